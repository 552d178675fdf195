"""The tables and pictures of the READMEs are those that their commands make of what is committed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="scripts/run --extra benchmark brings it")
import matplotlib.image  # noqa: E402
import pandas as pd  # noqa: E402
from scipy import stats  # noqa: E402

from benchmark.figures import popart_figures  # noqa: E402
from benchmark.runner import measured, tables  # noqa: E402
from benchmark.runner.publish import OTHERS  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmark" / "results"
READMES = {name: (ROOT / name).read_text() for name in tables.READMES}
PROSE = {  # heads of the tables without measured numbers
    "README.md": ["to | read", "file | method | environments"],
    "algos/README.md": ["file | beside that, from pip", "file | content", "tag | meaning (x is `global_step`, "
                        "environment steps that counted)", "here | elsewhere", "file | differs"],
    "benchmark/README.md": ["suite | runs", "picture | command"],
    "curricula/README.md": ["curriculum | import from `curricula`", "library | command", "there | here"],
}  # fmt: skip
ONCE = {  # published reports some of whose table's columns were measured once, of runs that are not kept
    "bigfish_nature": "the returns on training levels of the final 500 episodes stood in no report",
    "pfsp_connect_four": "scripts/arena.py played the finished agents; its payoff.json lay in the runs",
    "pfsp_small": "the newest policies' NashConv stood in no report",
    "taper_grid": "means of the tasks, success at the end and shares of draws stood in no report",
    "taper_minigrid": "worst tasks, success at the end and shares of draws stood in no report",
}
LOST = {  # pictures that no command can make again
    "pfsp_connect_four/figures/payoff": "drawn by scripts/arena.py into a run that is not kept",
}


def heads(text):
    """Of the Markdown tables: their first lines, without the outer bars."""
    return [head.strip("| ") for head in re.findall(r"^(\|.*\|)\n\| ?-{3}", text, re.M)]


# ---- The READMEs -----------------------------------------------------------------------------------------------------


def test_every_table_of_a_readme_is_what_its_numbers_say():
    made = tables.tables()
    assert {name: text for name, text in READMES.items() if tables.filled(text, made) != text} == {}
    shown = [name for text in READMES.values() for name, _ in re.findall(tables.PLACE, text, re.S)]
    assert len(shown) == len(set(shown)) and set(made) == set(shown)


@pytest.mark.parametrize("name", READMES)
def test_no_table_of_measured_numbers_is_written_by_hand(name):
    assert heads(re.sub(tables.PLACE, "", READMES[name], flags=re.S)) == PROSE[name]


def test_what_was_measured_once_is_named_here_and_says_so():
    assert {path.parent.name for path in RESULTS.glob(f"*/{tables.ONCE}")} == ONCE.keys()
    made = tables.tables()
    for name in ONCE:
        once = json.loads((RESULTS / name / tables.ONCE).read_text())
        assert not once["also"].keys() & json.loads((RESULTS / name / "summary.json").read_text())["also"].keys()
        note = once["note"]
        assert re.search(r"measured\s+once.* by `scripts/run .*`.*: the runs are not kept", note), name
        assert re.search(r"commit \w{7}", note) and note in made[name]


def test_every_measured_speed_says_by_which_command_and_at_which_commit():
    for path in (RESULTS / tables.SPEED).glob("*.json"):
        for table in json.loads(path.read_text()).values():
            (program,) = re.findall(
                r"^`(?:python|scripts/run(?: --extra \w+)*) (benchmark/speed/\w+\.py)", table["note"]
            )
            assert (ROOT / program).is_file() and re.search(r"commit(?:ted in)? \w{7}", table["note"])
            assert all(len(row) == len(table["header"]) for row in table["rows"])


@pytest.mark.parametrize("name", READMES)
def test_every_picture_can_be_made_again(name):
    """`remake` of each report, which another test does with all of them, draws it; or it is named above."""
    found = set(re.findall(r"benchmark/results/([\w/]+)\.png", READMES[name]))
    for picture in found - LOST.keys():
        suite, _, which = picture.partition("/")
        if which == "curves":  # of cartpole_curriculum, below
            assert suite == "cartpole_curriculum"
        elif which == "figures/curves":
            assert set(json.loads((RESULTS / suite / "curves.json").read_text()))
        else:
            assert Path(which).name in OTHERS and (RESULTS / f"{picture}.json").is_file()


def test_pictures_that_cannot_be_made_again_are_named_and_no_others():
    assert all((RESULTS / f"{picture}.png").is_file() for picture in LOST)
    assert not [picture for picture in LOST if (RESULTS / f"{picture}.json").is_file()]


def test_the_cartpole_picture_is_made_again_from_its_numbers(tmp_path):
    shutil.copyfile(RESULTS / "cartpole_curriculum" / "curves.json", tmp_path / "curves.json")
    command = [sys.executable, ROOT / "scripts/integrations/cleanrl_cartpole.py", "--remake", "--out", tmp_path]
    subprocess.run(command, check=True, timeout=120)
    then, now = (matplotlib.image.imread(f / "curves.png") for f in (RESULTS / "cartpole_curriculum", tmp_path))
    assert then.shape == now.shape and abs(then - now).mean() < 1e-3


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/summary.json")))
def test_a_score_is_the_mean_of_the_last_evaluations_by_their_episodes(name):
    """One rule for all that is published. The curves hold a value from its evaluation to the next."""
    environments = json.loads((RESULTS / name / "summary.json").read_text())["environments"]
    weights = [50, 50, {"bigfish_nature": 500, "minigrid_plr": 200}.get(name, 50)]  # others: as many in all
    for env, of in json.loads((RESULTS / name / "curves.json").read_text()).items():
        runs = np.array([list(curve["runs"].values()) for curve in of.values()], float).reshape(-1, 100)
        fresh = np.diff(np.nan_to_num(runs), axis=1, prepend=0).any(0)  # cells in which some run has a new value
        for algorithm, curve in of.items():
            assert curve["runs"].keys() == environments[env][algorithm]["scores"].keys()
            for seed, values in curve["runs"].items():
                last = np.array(values)[fresh][-3:].astype(float)
                score = environments[env][algorithm]["scores"][seed]
                assert score == pytest.approx(np.average(last, weights=weights), rel=1e-4, abs=1e-4)


def test_the_score_of_impala_mixed_is_the_mean_of_the_games_between_their_constants():
    found = json.loads((RESULTS / "impala_mixed" / "summary.json").read_text())
    limits = {"CartPole-v1@100": (0, 50_000), "Acrobot-v1": (-500, -80), "CartPole-v1@0.01": (0, 5)}
    for name, of in found["environments"]["mixed"].items():
        for seed, score in of["scores"].items():
            raw = {game: found["also"][f"eval/{game}/return_mean"]["mixed"][name]["scores"][seed] for game in limits}
            assert score == pytest.approx(np.mean([(raw[g] - low) / (high - low) for g, (low, high) in limits.items()]))


def test_random_and_human_scores_are_those_of_the_script():
    from algos.impala_popart_atari import HUMAN_RANDOM

    assert {game: HUMAN_RANDOM[game] for game in tables.ATARI} == tables.ATARI


def test_the_games_picture_is_of_binned_means_and_is_drawn_from_its_numbers(tmp_path, monkeypatch):
    rows = [("tasks/A/episodic_return", "x", 1, step, value) for step, value in ((10, 1.0), (20, 3.0), (60, 7.0))]
    rows += [("tasks/A/episodic_return", "x", 2, 60, 9.0), ("popart/A/mu", "x", 1, 10, 5.0)]
    rows += [("popart/A/sigma", "x", 1, 10, 0.5)]
    metrics = pd.DataFrame(rows, columns=["key", "algorithm", "seed", "global_step", "value"])
    data = popart_figures.gather(metrics, ["A"], ["x", "y"], np.linspace(0, 80, 3))
    assert data["steps"] == [20, 60] and data["games"]["A"]["returns"] == {"x": {"1": [2, 7], "2": [None, 9]}, "y": {}}
    assert data["games"]["A"]["mu"]["x"] == {"1": [5, None]} and data["games"]["A"]["sigma"]["x"] == {"1": [0.5, None]}
    drawn = []
    monkeypatch.setattr(popart_figures, "save", lambda figure, path: drawn.append((figure, path)))
    (tmp_path / "games.json").write_text(json.dumps(data))
    popart_figures.remake(tmp_path)
    ((figure, path),) = drawn
    one, two, mean = (line.get_ydata() for line in figure.axes[0].lines)
    assert path == tmp_path / "games" and one.tolist() == [2, 7] and two[1] == 9 and mean[1] == 8 and np.isnan(mean[0])


# ---- How a table is made ---------------------------------------------------------------------------------------------

X, Y = [0.5, 0.7, 0.6, 0.9, 0.8], [0.3, 0.6, 0.2, 0.7, 0.7]


@pytest.fixture
def report(tmp_path):
    def mean(values):
        ends = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
        scores = {str(seed): value for seed, value in enumerate(values, 1)}
        return {"value": np.mean(values), "interval": list(ends), "n": 5, "scores": scores}

    summary = {"algorithms": ["uniform", "taper"], "paired": True, "speed": {"taper": {"steps_per_second": 1234.5}},
               "environments": {"E": {"uniform": mean(Y), "taper": mean(X)}},
               "also": {"eval/k": {"E": {"uniform": mean([2.0, 2, 2, 2, 3])}}}}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    once = {"eval/k": {"E": {"uniform": {"value": 9}}}, "eval/o": {"E": {"uniform": {"value": 0.0721}}},
            "eval/r": {"E": {"taper": {"value": 0.45, "range": [0.421, 0.468]}}}}  # fmt: skip
    (tmp_path / "once.json").write_text(json.dumps({"note": "N", "also": once}))
    return tables.Report(tmp_path)


def test_cells_of_a_report(report):
    low, high = stats.t.interval(0.95, 4, 0.7, stats.sem(X))
    assert report.score("E")("taper") == f"0.70 ({low:.2f} to {high:.2f})" == "0.70 (0.50 to 0.90)"
    assert report.also("eval/k", "E")("uniform") == "2.20 (1.64 to 2.76)"  # of the report, not measured once
    assert report.also("eval/o", "E")("uniform") == "0.072" and report.also("eval/o", "E")("taper") == ""
    assert report.also("eval/o", "E", tables.percent)("uniform") == "7.2 %"
    assert report.also("eval/r", "E")("taper") == "0.45 [0.42 to 0.47]"
    assert report.seeds("taper") == "1, 2, 3, 4, 5" and report.note == "N"
    header, rows = report.by_algorithm("replay", {"score": report.score("E")}, {"taper": "ours"})
    assert header == ["replay", "score"] and [row[0] for row in rows] == ["`uniform`", "ours"]


@pytest.mark.parametrize("paired", [True, False])
def test_differences_have_the_intervals_of_scipy(report, paired):
    report.paired = paired
    test = stats.ttest_rel(X, Y) if paired else stats.ttest_ind(X, Y, equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert report.minus("E", "uniform")("taper") == f"+0.20 ({tables.number(low)} to {tables.number(high)})"
    assert report.minus("E", "uniform")("uniform") == ""


def test_tables_are_put_in_their_places_and_unknown_ones_are_named():
    text = "a\n<!-- table t -->\nold\n<!-- end of table -->\nb\n<!-- table u -->\n<!-- end of table -->\n"
    made = {"t": "| x |\n", "u": "| y |\n"}
    new = "a\n<!-- table t -->\n| x |\n\n<!-- end of table -->\nb\n<!-- table u -->\n| y |\n\n<!-- end of table -->\n"
    assert tables.filled(text, made) == new == tables.filled(new, made)
    with pytest.raises(SystemExit, match="error: there is no table u, only t"):
        tables.filled(text, {"t": ""})


def test_the_command_prints_a_table():
    command = [sys.executable, ROOT / "benchmark" / "run.py", "tables"]
    shown = subprocess.run([*command, "plr_scaling"], capture_output=True, text=True, timeout=120)
    assert (
        shown.returncode == 0 and heads(shown.stdout)[0].startswith("transform | levels") and "| rank |" in shown.stdout
    )
    wrong = subprocess.run([*command, "nothing"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: there is no table nothing, only bigfish_nature, ")
    assert wrong.stderr.count("\n") == 1


# ---- Speed -----------------------------------------------------------------------------------------------------------


def test_a_speed_program_s_table_is_that_of_the_readme(tmp_path):
    """From its --output on: the same cells, and by what they were measured."""
    output = tmp_path / "speed" / "plr_scaling.json"
    words = ["--levels", "10", "--transforms", "rank", "power"]
    command = [sys.executable, ROOT / "benchmark/speed/plr_scaling.py", *words, "--output", output]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    (table,) = json.loads(output.read_text()).values()
    assert [row[:2] for row in table["rows"]] == [["rank", "10"], ["power", "10"]]
    assert re.match(rf"`python benchmark/speed/plr_scaling.py {' '.join(words)}`, commit \w{{7}}", table["note"])
    assert table["note"].endswith("; microseconds, median (mean).")
    made = tables.tables(tmp_path)["plr_scaling"]
    assert table["note"] in made and all(line in printed for line in made.splitlines() if line.startswith("|"))


def test_every_speed_program_can_write_its_table():
    for path in (ROOT / "benchmark" / "speed").glob("*.py"):
        text = path.read_text()
        assert re.search(r"finish\(\s*\{.*output", text, re.S) and "output: Path | None" in text


def test_the_command_is_told_without_the_file(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmark/speed/x.py"), "--a", "b c", "--output", "f", "--d"])
    assert measured.command() == "python benchmark/speed/x.py --a 'b c' --d"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmark/speed/x.py"), "--output=f", "--d"])
    assert measured.command() == "python benchmark/speed/x.py --d"
