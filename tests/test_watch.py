"""scripts/watch.py, export.py, init_from.py, pack.py on tiny runs of every script; the agents in benchmark/agents."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from PIL import Image, ImageSequence
from test_runs import assert_same
from test_standalone import SCRIPTS, TWO_UPDATES

from scripts import arena, export, init_from, pack, watch

ROOT = Path(__file__).parents[1]
AGENTS = sorted(path.parent for path in (ROOT / "benchmark" / "agents").glob("*/config.json"))
VECTOR = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 16 --eval-episodes 1"
MORE = {  # what the scripts' own two updates leave out
    "boxes": ("ppo_vector", f"--env-id Pendulum-v1 --norm-obs {VECTOR}"),
    "envpool": ("ppo_vector", f"--env-id CartPole-v1 --vectorization envpool {VECTOR}"),
    "feedforward": ("impala_popart", "--env-id CartPole-v1 --lstm-size 0 --num-actors 2 --envs-per-actor 2 "
                    "--batch-rollouts 2 --num-steps 8 --eval-episodes 1 --total-timesteps 16"),
    "function": ("nsga2", "--problem zdt1 --pop-size 4 --total-timesteps 8"),
    "probe": ("ppo", f"--env-id probe_envs:Chain-v0 {VECTOR} --eval-max-steps 5"),
}  # fmt: skip
PICTURES = {  # an episode of each game, task, split or seat; pixels of an episode's picture
    "a3c": (1, (300, 200)),
    "appo_pfsp": (2, (480, 320)), "appo_pfsp_openspiel": (2, (480, 320)), "dqn_taper": (4, (316, 316)),
    "dqn_taper_crafter": (1, (300, 200)), "dqn_taper_minigrid": (1, (320, 320)),
    "evolution_strategies": (1, (300, 200)), "impala_popart": (3, (300, 250)),
    "impala_popart_atari": (1, (252, 252)), "impala_popart_procgen": (1, (320, 320)),
    "neuroevolution": (1, (320, 352)),
    "nsga2": (1, (320, 352)), "onpolicy_choices": (1, (480, 480)), "pbt_ppo": (1, (300, 200)), "ppo": (1, (300, 200)),
    "ppo_plr": (2, (320, 320)),
    "ppo_plr_minigrid": (2, (320, 320)), "ppo_vector": (1, (300, 200)),
}  # fmt: skip


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Name -> the folder of a run of two updates, made when it is first asked for."""
    found = {}

    def make(name):
        if name not in found:
            script, words = MORE.get(name, (name, TWO_UPDATES.get(f"{name}.py")))
            module, folder = importlib.import_module(f"algos.{script}"), tmp_path_factory.mktemp(name)
            words = [*words.replace("--num-actors 1", "--num-actors 0").split(), "--progress", "none"]
            module.train(tyro.cli(module.Args, args=[*words, "--run-dir", str(folder)]))
            found[name] = next(folder.rglob("config.json")).parent
        return found[name]

    return make


def frames(path):
    with Image.open(path) as image:
        return [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def refused(program, *arguments):
    """The one line with which a program ends."""
    with pytest.raises(SystemExit) as ended:
        program.main(program.Args(*arguments))
    assert "\n" not in str(ended.value)
    return str(ended.value)


# ---- scripts/watch.py ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [script.stem for script in SCRIPTS])
def test_every_script_s_run_is_filmed(name, run_of, tmp_path, capsys):
    run = run_of(name)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    watch.main(watch.Args(run, max_steps=15, output=tmp_path / "a.gif"))
    number, size = PICTURES[name]
    shown = capsys.readouterr().out
    assert shown.startswith(f"Running the program that lies in the run: {run}/code.py\n")
    assert shown.count(": return ") == number and f"a.gif shows {number} episode" in shown
    pictures = frames(tmp_path / "a.gif")
    assert {picture.shape for picture in pictures} == {(size[1], size[0], 3)}
    assert all(picture.std() > 3 for picture in pictures)
    if name != "dqn_taper_minigrid":  # which may turn to a wall that it faces
        assert len({picture.tobytes() for picture in pictures}) > 1
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}  # not a bit of it


def test_a_film_shows_the_whole_episode(run_of):
    """CartPole falls in the last picture; an episode has a picture more than steps; another has another seed."""
    run = run_of("ppo")
    (first, film), (second, _) = watch.watch(run, arena.load_program(run), 2, 1000)
    assert len(film) == first["length"] + 1 and first["return"] == first["length"]
    assert len({picture.tobytes() for picture in film}) > len(film) / 2
    rows = watch.evaluate(run, arena.load_program(run), eval_episodes=1, eval_seed=10_001)
    assert rows == [second]
    rooms = run_of("dqn_taper")
    assert [len(film) for _, film in watch.watch(rooms, arena.load_program(rooms), 1, 15)] == [16] * 4


def test_evaluation_is_the_run_s_own(run_of):
    run = run_of("ppo_vector")
    rows = watch.evaluate(run, arena.load_program(run))
    result = json.loads((run / "result.json").read_text())
    assert np.mean([row["return"] for row in rows]) == result["eval/return_mean"]


def test_films_of_other_environments(run_of, tmp_path, capsys):
    watch.main(watch.Args(run_of("boxes"), max_steps=5, output=tmp_path / "a.gif"))
    watch.main(watch.Args(run_of("envpool"), max_steps=5, output=tmp_path / "b.mp4", fps=10))
    assert "envpool draws no pictures: this is Gymnasium's CartPole-v1.\n" in capsys.readouterr().out
    assert len(frames(tmp_path / "a.gif")) > 3 and (tmp_path / "b.mp4").read_bytes()[4:8] == b"ftyp"


def test_crafter_is_filmed():
    """A step of it alone: a world for each of its 22 tasks takes half a minute."""
    pytest.importorskip("crafter")
    from algos import dqn_taper_crafter as module

    reels = []
    with watch.filming(module, SimpleNamespace(env_id="crafter"), reels, {}):
        env = module.make_env("crafter", 10)
        env.reset(seed=1)
        env.step(1)
    ((first, second),) = reels
    assert first.shape == (320, 320, 3) and first.std() > 3 and (first != second).any() and reels[0].fps == 15


def test_vector_pong_is_drawn_where_bats_and_ball_are():
    """ImagePong too, which steps as VectorPong does. A film ends with its game."""
    from algos import neuroevolution as module

    games = module.VectorPong([1, 2])
    games.reset()
    games.bats[0], games.ball[0, :2], games.points[0] = (0, 145), (100, 50), (3, 12)
    picture = watch.pong(games, 0)
    at = lambda x, y: tuple(int(v) for v in picture[32 + round(2 * y), round(2 * x)])  # noqa: E731
    assert at(16, 0) == at(20.5, 14.5) == (255, 165, 0) and at(15.5, 0) == at(16, 15) == (0, 0, 0)
    assert at(139, 145) == at(143.5, 159.5) == (0, 191, 255) and at(144, 150) == at(140, 144.5) == (0, 0, 0)
    assert at(100, 50) == at(103.5, 53.5) == (255,) * 3 and at(99.5, 50) == at(104, 50) == (0, 0, 0)
    assert (picture[:31] != watch.pong(games, 1)[:31]).any()  # 3 : 12, not 0 : 0

    reels = []
    with watch.filming(module, SimpleNamespace(env_id="VectorPong"), reels, {}):
        games = module.VectorPong([1, 2])
        games.reset()
        games.round[0] = 19  # its last round: in the first game nobody moves, and the ball leaves
        lengths = None
        for frame in range(1, 60):
            games.bats[:] = 0
            over = games.step(np.ones((2, 2), int))[2]
            lengths = lengths or (frame if over[0] else None)
    assert lengths and len(reels) == 2 and len(reels[1]) == 60 and reels[0].fps == 30


def test_boards_are_drawn_as_they_were_played():
    """Red 3, yellow 3, red 0: in Connect Four the second piece lies on the first."""
    from algos import appo_pfsp

    picture = watch.board(appo_pfsp.make_games("connect_four", 1), [(0, 3), (1, 3), (0, 0)])
    at = lambda row, column: tuple(picture[row * 48 + 24, column * 48 + 24])  # noqa: E731
    assert (at(5, 3), at(4, 3), at(5, 0), at(5, 1)) == ((210, 40, 40), (240, 200, 40), (210, 40, 40), (235,) * 3)
    picture = watch.board(appo_pfsp.make_games("tic_tac_toe", 1), [(0, 3), (1, 8)])
    assert (at(1, 0), at(2, 2), at(0, 0)) == ((210, 40, 40), (240, 200, 40), (235,) * 3)
    rooms = watch.two_rooms(
        importlib.import_module("algos.dqn_taper"), "two-rooms-mixed", np.eye(19)[2] + np.eye(19)[14]
    )
    assert tuple(rooms[5, 2]) == (40, 90, 220) and tuple(rooms[1, 1]) == (255, 220, 0)


def test_watch_says_what_is_wrong(run_of, tmp_path, monkeypatch):
    run, copy = run_of("ppo"), tmp_path / "run"
    assert refused(watch, tmp_path).startswith(f"error: {tmp_path} is no folder of a run: it has no config.json")
    assert refused(watch, run, 0).startswith("error: --episodes, --max-steps and --fps must be 1 or more")
    assert refused(watch, run, 1, 9, tmp_path / "a.avi").endswith("the name must end in .gif or .mp4")
    (tmp_path / "file").touch()
    said = refused(watch, run, 1, 9, tmp_path / "file" / "a.gif")
    assert re.match(f"error: {tmp_path}/file/a.gif cannot be written: .*Choose another --output", said)
    said = refused(watch, run_of("probe"))
    assert "Chain-v0 cannot be filmed: it draws no pictures (its render_modes are []), and its observations" in said

    shutil.copytree(run, copy)
    (copy / "code.py").write_text("x = 1\n")
    assert "is none of algos/'s scripts: it lacks Args" in refused(watch, copy)
    for path in (copy / "checkpoints").iterdir():
        path.unlink()
    assert refused(watch, copy) == f"error: {copy} has no checkpoint yet: train on"

    crafter = tmp_path / "crafter"
    shutil.copytree(run_of("dqn_taper_crafter"), crafter)
    config = json.loads((crafter / "config.json").read_text())
    config["args"]["env_id"] = "crafter"
    (crafter / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "crafter", None)
    assert "--env-id crafter: import of crafter halted" in (said := refused(watch, crafter))
    assert "use scripts/run --extra crafter" in said


@pytest.mark.parametrize("tool, verb", [(watch, "film"), (export, "export")])
def test_a_run_of_a_test_function_has_only_its_picture(tool, verb, run_of, monkeypatch):
    run = run_of("function")
    for name in ("onnx", "onnxscript", "onnxruntime") if tool is export else ():
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    said = refused(tool, run)
    what = f"there is nothing to {verb}, zdt1 is a test function"
    assert said == f"error: {run}: {what}. Pictures of the run: {run}/front.png"
    assert (run / "front.png").is_file()


def test_a_checkpoint_of_another_network_is_refused(run_of, tmp_path):
    shutil.copytree(run_of("ppo"), tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    torch.save(torch.load(path) | {"agent": {"policy.0.weight": torch.zeros(3)}}, path)
    assert "cannot be played: RuntimeError: Error(s) in loading" in refused(watch, tmp_path / "run")


# ---- scripts/export.py -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, inputs, outputs", [
    ("ppo", "obs", "logits value"),
    ("boxes", "obs", "mean value std"),
    ("ppo_plr", "obs", "logits value"),
    ("nsga2", "obs", "logits value"),
    ("appo_pfsp", "obs legal", "logits value"),
    ("impala_popart", "obs starts last_action last_reward core", "logits next_core"),
    ("feedforward", "obs", "logits"),
    ("dqn_taper", "obs", "q"),
    ("neuroevolution", "obs", "logits value"),
])  # fmt: skip
def test_a_network_in_onnx_is_torch_s(name, inputs, outputs, run_of, tmp_path, capsys):
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export.main(export.Args(run_of(name), tmp_path / "a.onnx"))
    differences = re.search("difference to torch: (.*) on random inputs, (.*) on those", capsys.readouterr().out)
    assert all(float(number) < 1e-5 for number in differences.groups())
    onnx.checker.check_model(tmp_path / "a.onnx")
    session = ort.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == inputs.split()
    assert [one.name for one in session.get_outputs()] == outputs.split()
    if name == "boxes":  # raw observations in: the normalisation is in the file
        state = arena.load_program(run_of(name))[2]["obs_norm"]
        obs = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32) * 9
        x = np.clip((obs - state["mean"].numpy()) / np.sqrt(state["var"].numpy() + 1e-8), -10, 10)
        weights = {k: v.numpy() for k, v in arena.load_program(run_of(name))[2]["agent"].items()}
        layers = sorted(k.removesuffix(".weight") for k in weights if re.match(r"policy.*weight", k))
        for number, layer in enumerate(layers):
            x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            x = np.tanh(x) if number < 2 else x
        mean, _, std = session.run(None, {"obs": obs})
        np.testing.assert_allclose(mean, x, atol=1e-5)
        np.testing.assert_allclose(std, np.tile(np.exp(weights["log_std"]), (5, 1)), rtol=1e-6)


def test_a_network_that_differs_is_not_written(run_of, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(export, "LIMIT", -1)
    assert "the network in ONNX differs from torch's by" in refused(export, run_of("ppo"), tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


def test_export_refuses_a_run_without_a_module(run_of, tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    said = refused(export, run_of("onpolicy_choices"), tmp_path / "a.onnx")
    assert "cannot be exported: its evaluation calls no network that is a torch module" in said


def test_export_says_what_is_wrong(run_of, tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    run = run_of("ppo")
    assert refused(export, tmp_path).startswith(f"error: {tmp_path} is no folder of a run")
    assert refused(export, run, tmp_path / "a.pt").endswith("the name must end in .onnx")
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(export, run, tmp_path / "file" / "a.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert refused(export, run) == f"error: onnxscript is missing: scripts/run --extra onnx scripts/export.py {run}"


# ---- scripts/pack.py, and the agents that come with the repository ---------------------------------------------------


def test_a_packed_run_plays_as_the_run_did(run_of, tmp_path):
    run = run_of("ppo_vector")
    pack.main(pack.Args(run, tmp_path / "a"))
    whole, packed = (watch.evaluate(path, arena.load_program(path)) for path in (run, tmp_path / "a"))
    assert whole == packed
    assert sum(path.stat().st_size for path in (tmp_path / "a" / "checkpoints").iterdir()) < 60_000
    text = (tmp_path / "a" / "config.json").read_text()
    assert json.loads(text)["argv"][0] == "algos/ppo_vector.py" and "host" not in json.loads(text)
    assert str(run.parents[2]) not in text
    assert refused(pack, run, tmp_path / "a") == f"error: {tmp_path}/a is there: remove it, or name another folder"
    (tmp_path / "a" / "result.json").unlink()
    assert "is not finished: its own command goes on" in refused(pack, tmp_path / "a", tmp_path / "b")


def test_a_damaged_run_is_not_packed(run_of, tmp_path):
    """Nothing is left; and the folder of all runs is in no pack, however it was given."""
    run, words = tmp_path / "run", ["ppo.py", "--run-dir=/some/where", "--seed", "1", "--run-dir", "/some/where"]
    shutil.copytree(run_of("ppo"), run)
    config = json.loads((run / "config.json").read_text())
    for argv in ({"argv": words}, {}):
        del config["argv"]
        (run / "config.json").write_text(json.dumps(config := config | argv))
        pack.main(pack.Args(run, tmp_path / f"pack{len(argv)}"))
        packed = json.loads((tmp_path / f"pack{len(argv)}" / "config.json").read_text())
        assert packed["argv"] == ["algos/ppo.py", *(["--seed", "1"] if argv else [])]
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:500])
    assert "cannot be read" in refused(pack, run, tmp_path / "b")
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert refused(pack, run, tmp_path / "b") == f"error: {run} has no checkpoint" and not (tmp_path / "b").exists()


README = (ROOT / "benchmark" / "agents" / "README.md").read_text()


def test_the_agents_are_those_of_the_readme():
    assert len(AGENTS) >= 4
    assert re.findall(r"^\| `(\w+)` \|", README, re.M) == [agent.name for agent in AGENTS]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_is_small_scores_what_it_says_and_is_filmed(agent, tmp_path):
    kept = [path for pattern in ("*.json", "code.py", "checkpoints/*") for path in agent.glob(pattern)]
    assert sum(path.stat().st_size for path in kept if path.name != "payoff.json") < 1_000_000
    config = json.loads((agent / "config.json").read_text())
    row = next(line for line in README.splitlines() if line.startswith(f"| `{agent.name}` |"))
    score, episodes = re.search(r"\*\*([\d.]+)\*\* in (\d+) ", row).groups()
    for text in (f"{config['args']['total_timesteps']:,}", config["git_commit"][:7], f"| {config['args']['seed']} |"):
        assert text in row, text
    words = [word for word in config["argv"] if word not in ("--progress", "log")]
    assert f"scripts/run {' '.join(words)}\n" in README
    assert config["args"]["run_dir"] == "runs" and "host" not in config and not config["git_dirty"]
    assert not re.search(r"/(tmp|root|home|work)/", (agent / "config.json").read_text())

    program = arena.load_program(agent)
    rows = watch.evaluate(agent, program, eval_episodes=int(episodes), final_eval_episodes=int(episodes))
    returns = [row["return"] for row in rows if row["split"] == "eval"]
    assert len(returns) == int(episodes) and f"{np.mean(returns):.{len(score.split('.')[1])}f}" == score
    watch.main(watch.Args(agent, max_steps=30, output=tmp_path / "a.gif"))
    pictures = frames(tmp_path / "a.gif")
    assert len({picture.tobytes() for picture in pictures}) > 3
    assert pictures[0].shape == {"cartpole": (200, 300, 3), "connect_four": (288, 336, 3), "tic_tac_toe": (288, 288, 3),
                                 "multiroom": (400, 400, 3)}[agent.name]  # fmt: skip


@pytest.mark.parametrize("name, moves", [("connect_four", "1\n1\nq\n"), ("tic_tac_toe", "q\n")])
def test_an_agent_plays_a_person_and_engines(name, moves, tmp_path):
    agent = ROOT / "benchmark" / "agents" / name
    command = [sys.executable, "scripts/play.py", str(agent), "--agent-first"]
    done = subprocess.run(command, input=moves, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and "the agent: c" in done.stdout and done.stdout.endswith("left the game\n")
    arena.main(arena.Args((agent,), engines=("random",), games=20, greedy=True, out=tmp_path))
    table = json.loads((tmp_path / "payoff.json").read_text())
    assert table["labels"] == ["random", "newest"] and table["payoff"][1][0] >= 0.9


# ---- scripts/init_from.py --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["appo_pfsp", "boxes", "dqn_taper", "impala_popart", "neuroevolution", "ppo", "ppo_plr_minigrid"]
)
def test_a_run_begins_with_another_s_networks(name, run_of, tmp_path, monkeypatch, capsys):
    """To the bit; its own folder, a first update as of a new run; the same command finds it."""
    run = run_of(name)
    script, words = MORE.get(name, (name, TWO_UPDATES.get(f"{name}.py")))
    module, first = importlib.import_module(f"algos.{script}"), {}
    checkpoint = module.RunLogger.checkpoint

    def seen(self, update, *rest, **options):
        first.setdefault(update, {name: pack_state(part.state_dict()) for name, part in self.parts.items()})
        return checkpoint(self, update, *rest, **options)

    pack_state = module.pack
    monkeypatch.setattr(module.RunLogger, "checkpoint", seen)
    words = words.replace("--num-actors 1", "--num-actors 0").split() + ["--progress", "none", "--run-dir", tmp_path]
    command = [run, ROOT / "algos" / f"{script}.py", *words, "--seed", 2]
    result = init_from.main([*map(str, command)])
    state = torch.load(max((run / "checkpoints").glob("*.pt")), weights_only=True)
    networks = [part for part in init_from.NETWORKS if part in state]
    assert networks == {"boxes": ["agent", "obs_norm"], "dqn_taper": ["agent", "target"]}.get(name, ["agent"])
    for part in networks:
        if part == "obs_norm":  # which has seen the first observations since
            assert first[0][part]["count"] > state[part]["count"] > 1
        else:
            assert_same(first[0][part], state[part])
    folder = next(tmp_path.rglob("result.json")).parent
    assert folder.parent.parent.name.startswith(f"{script}-from-") and folder.name.startswith("seed2-")
    assert f"Begins with {', '.join(networks)} of {run}" in capsys.readouterr().err
    assert init_from.main([*map(str, command)]) == result and "finished before" in capsys.readouterr().out


def test_init_from_refuses_what_does_not_fit(run_of, tmp_path):
    def refused_by(run, script, *words):
        with pytest.raises(SystemExit) as ended:
            init_from.main([str(run), str(ROOT / "algos" / script), *words, "--run-dir", str(tmp_path)])
        assert "\n" not in str(ended.value)
        return str(ended.value)

    run = run_of("ppo")
    assert "has another network: " in refused_by(run, "ppo.py", "--env-id", "Acrobot-v1")
    assert "holds agent, and this command trains agent, target" in refused_by(run, "dqn_taper.py")
    assert "is no script of algos/: give one of a3c.py, appo_pfsp.py, " in refused_by(run, "no.py")
    for script in init_from.OTHERWISE:  # what lies in their checkpoints as `agent` is not what they train
        assert "does not begin with one network" in refused_by(run, f"{script}.py")
    assert "is no folder of a run" in refused_by(tmp_path, "ppo.py")
    with pytest.raises(SystemExit) as ended:
        init_from.main([str(run)])
    assert ended.value.code == 2


def test_a_damaged_program_is_one_line(run_of, tmp_path):
    run = shutil.copytree(run_of("ppo"), tmp_path / "run")
    (run / "code.py").write_text("import no_such_package\n")
    assert "code.py does not run (ModuleNotFoundError: No module named 'no_such_package')" in refused(watch, run)
    code = "\n\ndef evaluate(*arguments):\n    raise ValueError('nothing to see')\n"
    shutil.copy(ROOT / "algos" / "ppo.py", run / "code.py")
    (run / "code.py").write_text(
        (run / "code.py").read_text().replace('if __name__ == "__main__"', f"{code}\nif False")
    )
    assert "nothing to see" in refused(export, run, run / "a.onnx") and not (run / "a.onnx").exists()
