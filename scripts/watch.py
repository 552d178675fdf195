"""Films a run of any script of algos/: a GIF, or an MP4, of the newest checkpoint's evaluation.

  scripts/run scripts/watch.py runs/ppo/CartPole-v1/seed1-1a2b3c4d
  scripts/run scripts/watch.py RUN --episodes 3 --output agent.mp4

The program that lies in the run, code.py, evaluates its newest checkpoint as it does with --eval-only, an episode of
each game, task, split or seat at a time, and leaves the run as it was. Gymnasium's environments draw themselves; of
Procgen and Atari you see what the agent sees; boards, hands of cards, the two rooms and Vector Pong are drawn here. In
appo_pfsp*.py's games the opponent plays at random: scripts/arena.py has stronger ones.
"""

import io
import math
import os
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from unittest import mock

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.arena import fail, load_program  # noqa: E402


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # folder of the run
    episodes: int = 1  # of each game, task, split or seat that the script's evaluation tells apart
    max_steps: int = 1000  # longer episodes are cut off
    output: Path | None = None  # a .gif or .mp4; None: RUN/videos/<step>.gif
    fps: float | None = None  # pictures a second; None: as fast as the environment is meant to be seen


# ---- A run's own evaluation ------------------------------------------------------------------------------------------


class Stage(ExitStack):
    """What a script's `train` gets for a RunLogger: networks from the checkpoint, and nothing is written: `rows` are
    those of its evaluation."""

    def __init__(self, module, run, state):
        super().__init__()
        self.dir, self.result, self.resumed, self.state, self.parts, self.rows = run, None, True, state, {}, []
        self.log_eval = partial(module.RunLogger.log_eval, self)

    def start(self, args):
        self.args = args
        return self

    def write_rows(self, _name, _step, rows):
        self.rows += rows

    def check_signals(self):
        """Nothing is saved here: signals do what they always do."""

    def restore(self, **parts):
        self.parts = {name: parts[name] for name in ("agent", "obs_norm") if name in parts}
        for name, part in self.parts.items():
            part.load_state_dict(self.state[name])
        return self.state["update"], self.state["global_step"], self.state["row"]


def evaluate(run, program, around=lambda parts: ExitStack(), **changes):
    """The rows, one an episode, of the evaluation by a run's own program, as its --eval-only makes them; `changes` are
    of its arguments, where it has them. It runs within the context `around(the networks by name)`."""
    import gymnasium

    args, module, state = program
    if not all(hasattr(module, name) for name in ("Args", "RunLogger", "evaluate", "train")):
        fail(f"{run}/code.py is none of algos/'s scripts: it lacks Args, RunLogger, evaluate or train")
    changes |= {"run_dir": Path(), "device": "cpu", "eval_only": True, "capture_video": False, "track": False,
                "pbt": False, "progress": "none", "num_workers": 0}  # fmt: skip
    original, stage = module.evaluate, Stage(module, run, state)

    def play(*arguments, **options):
        with around(stage.parts):
            return original(*arguments, **options)

    try:
        names = [entry.name for entry in fields(module.Args) if entry.init]
        values = vars(args) | {name: changes[name] for name in names if name in changes}
        if values.get("vectorization") == "async":  # a process cannot be filmed
            values["vectorization"] = "sync"
        patches = [mock.patch.object(module, "RunLogger", stage.start), mock.patch.object(module, "evaluate", play)]
        with patches[0], patches[1], redirect_stdout(io.StringIO()):  # it prints the means
            module.train(module.Args(**{name: values[name] for name in names if name in values}))
        return stage.rows
    except (gymnasium.error.Error, ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        fail(f"{run} cannot be played: {type(error).__name__}: {' '.join(str(error).split())[:500]}")


def need_policy(run, program, verb):
    """Ends where a run was of a test function, as those of nsga2.py are."""
    args, module, _ = program
    if getattr(args, "env_id", None) in getattr(module, "FUNCTIONS", ()):
        pictures = ", ".join(map(str, sorted(run.glob("*.png")))) or "none yet"
        fail(f"{run}: there is nothing to {verb}, {args.env_id} is a test function. Pictures of the run: {pictures}")


# ---- Pictures --------------------------------------------------------------------------------------------------------


class Film(list):
    """Pictures (H, W, 3) uint8 of one episode, at most 480 wide and high. Small ones are enlarged."""

    def __init__(self, fps, *pictures):
        self.fps = fps
        self.extend(map(self.fit, pictures))

    def add(self, picture):
        self.append(self.fit(picture))

    @staticmethod
    def fit(picture):
        from PIL import Image

        side = max(picture.shape[:2])
        if side > 480:
            picture = np.asarray(Image.fromarray(picture).reduce(math.ceil(side / 480)))
        return np.kron(picture, np.ones((max(320 // side, 1),) * 2 + (1,), np.uint8))


def seen(obs):
    """The picture in an image observation: of stacked frames the newest. None where it is no image."""
    if obs.dtype != np.uint8 or obs.ndim not in (2, 3) or sorted(obs.shape)[-2] < 36:
        return None
    obs = obs if obs.ndim == 3 else obs[..., None]
    if obs.shape[0] < obs.shape[-1]:
        obs = obs.transpose(1, 2, 0)
    return np.array(obs if obs.shape[-1] == 3 else obs[..., -1:].repeat(3, -1))


def two_rooms(module, name, obs):
    """The 9 x 9 cells: agent blue, key and door yellow (the door green when it opens), the tasks' cells red."""
    x, y, key = obs[:9].argmax(), obs[9:18].argmax(), obs[18] > 0
    grid = np.full((9, 9, 3), 240, np.uint8)
    grid[:, 4] = 60
    for goal in module.Envs.TASKS[name.removeprefix("two-rooms-")].values():
        grid[goal[1], goal[0]] = 255, 170, 170
    grid[4, 4] = (120, 200, 120) if key else (200, 160, 0)
    if not key:
        grid[1, 1] = 255, 220, 0
    grid[y, x] = 40, 90, 220
    return grid


def board(games, moves):
    """Connect Four or tic-tac-toe after `moves`, (player, action): player 0 red, 1 yellow; the last move has a ring."""
    from PIL import Image, ImageDraw

    _, rows, columns = games.obs_shape
    image, filled = Image.new("RGB", (columns * 48, rows * 48), (30, 70, 160)), [0] * columns
    draw = ImageDraw.Draw(image)
    for row in range(rows):
        for column in range(columns):
            draw.ellipse((column * 48 + 5, row * 48 + 5, column * 48 + 43, row * 48 + 43), (235, 235, 235))
    for number, (player, action) in enumerate(moves, 1):
        row, column = divmod(action, columns)
        if games.num_actions == columns:  # it falls
            row, filled[action] = rows - 1 - filled[action], filled[action] + 1
        edge = "black" if number == len(moves) else None
        box = column * 48 + 5, row * 48 + 5, column * 48 + 43, row * 48 + 43
        draw.ellipse(box, [(210, 40, 40), (240, 200, 40)][player], edge, 4)
    return np.array(image)


def pong(games, i):
    """Game i of Vector Pong: the arena of 160 x 160, twice as large, under the points of both."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (320, 352), "black")
    draw = ImageDraw.Draw(image)
    draw.text((160, 16), "{} : {}".format(*games.points[i]), "white", anchor="mm", font_size=22)
    draw.line((0, 31, 319, 31), "gray")
    (x, y), (left, right) = games.ball[i, :2], games.bats[i]
    for corner_x, corner_y, width, height, color in (
        (16, left, 5, 15, "orange"), (139, right, 5, 15, "deepskyblue"), (x, y, 4, 4, "white")
    ):  # fmt: skip
        corner = round(2 * float(corner_x)), 32 + round(2 * float(corner_y))
        draw.rectangle((*corner, corner[0] + 2 * width - 1, corner[1] + 2 * height - 1), color)
    return np.array(image)


def text(lines):
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (480, 320), "white")
    ImageDraw.Draw(image).multiline_text((12, 12), lines, "black", font_size=18)
    return np.array(image)


def game(games, i, state, moves):
    """Game i of `games` after its `moves`, as a picture; `state`: OpenSpiel's."""
    if hasattr(games, "bits"):
        return board(games, moves)
    names = ["rock", "paper", "scissors"] if games.name.endswith("rps") else range(games.num_actions)
    lines = [f"{games.name}: the agent is player {i % 2}", ""]
    lines += str(state).splitlines() if state else [f"player {player}: {names[action]}" for player, action in moves]
    return text("\n".join(line[:50] for line in lines[:13]))


# ---- Where environments are filmed -----------------------------------------------------------------------------------


def film_env(env, film, picture):
    """Films a Gymnasium environment: its last episode with a step."""
    target, first = env.unwrapped, []
    reset, step = target.reset, target.step

    @wraps(reset)
    def filmed_reset(*args, **options):
        outcome = reset(*args, **options)
        first[:] = [picture(outcome[0])]
        return outcome

    @wraps(step)
    def filmed_step(action):
        outcome = step(action)
        if first:
            film[:] = [film.fit(first.pop())]
        film.add(picture(outcome[0]))
        return outcome

    target.reset, target.step = filmed_reset, filmed_step
    return env


def film_made(make, films):
    """gymnasium.make, whose environments are filmed."""

    def made(name, **options):
        env = make(name, **options)
        modes, shown = env.metadata.get("render_modes") or (), env.observation_space
        films.append(film := Film(env.metadata.get("render_fps") or 30))
        if "rgb_array" in modes:
            env.close()
            env = make(name, **options | {"render_mode": "rgb_array"})
            return film_env(env, film, lambda obs: env.unwrapped.render())
        if shown.shape and seen(np.zeros(shown.shape, shown.dtype)) is not None:
            return film_env(env, film, seen)
        fail(f"{name} cannot be filmed: it draws no pictures (its render_modes are {list(modes)}), and its "
             f"observations are no images: {str(shown)[:100]}")  # fmt: skip

    return made


def film_slots(step, films, fps, picture):
    """The `step` of environments side by side, whose observations are filmed to the end of an episode."""

    def filmed(self, actions):
        if self not in films:
            films[self] = [Film(fps, picture(obs)) for obs in self.obs]
        outcome = step(self, actions)
        for film, obs, terminated, truncated in zip(films[self], *(outcome[k] for k in (0, 2, 3))):
            if not (terminated or truncated):  # else obs is the next episode's
                film.add(picture(obs))
        return outcome

    return filmed


def film_pong(step, films):
    """The `step` of games of Vector Pong, to the end of a game."""

    def filmed(self, actions):
        if self not in films:
            films[self] = [Film(30, pong(self, i)) for i in range(self.num_games)]
        outcome = step(self, actions)
        for i in np.flatnonzero(~outcome[2]):  # in the others the next game has begun
            films[self][i].add(pong(self, i))
        return outcome

    return filmed


def film_games(step, films):
    """The `step` of games of two players."""
    moves = defaultdict(list)

    def filmed(self, actions, games=None):
        which = range(self.num_games) if games is None else games
        states = getattr(self, "states", [None] * self.num_games)
        if self not in films:
            films[self] = [Film(1, game(self, i, states[i], [])) for i in range(self.num_games)]
        found = [(i, self.player[i], states[i], action) for i, action in zip(which, actions)]
        outcome = step(self, actions, games)  # which begins a game that ended anew, and leaves its state as it ended
        for i, player, state, action in found:
            moves[i].append((int(player), int(action)))
            films[self][i].add(game(self, i, state, moves[i]))
        return outcome

    return filmed


@contextmanager
def filming(module, args, reels, _parts):
    """Environments made within it are filmed; afterwards `reels` holds a Film an environment, in the order of the rows
    of the script's evaluation."""
    import gymnasium

    made, slots = [], {}
    pictures = {  # of the classes that step many environments and are not Gymnasium's
        "ProcgenLevels": (15, seen),
        "ProcgenEnvs": (15, seen),
        "AtariEnvs": (15, seen),
    }
    if hasattr(getattr(module, "Envs", None), "TASKS"):
        pictures["Envs"] = (5, lambda obs: two_rooms(module, args.env_id, obs))
    if getattr(args, "vectorization", None) == "envpool":
        pictures["VectorEnvs"] = (15, seen)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gymnasium, "make", film_made(gymnasium.make, made)))
        for name, (fps, picture) in pictures.items():
            if family := getattr(module, name, None):
                stack.enter_context(mock.patch.object(family, "step", film_slots(family.step, slots, fps, picture)))
        for name in ("LineGames", "MatrixGames", "OpenSpielGames"):
            if family := getattr(module, name, None):
                stack.enter_context(mock.patch.object(family, "step", film_games(family.step, slots)))
        if family := getattr(module, "VectorPong", None):
            stack.enter_context(mock.patch.object(family, "step", film_pong(family.step, slots)))
        if crafter := getattr(module, "Crafter", None):

            def filmed():
                made.append(film := Film(15))
                return film_env(env := crafter(), film, lambda obs: env.game.render((320, 320)))

            stack.enter_context(mock.patch.object(module, "Crafter", filmed))
        yield
    reels += [film for film in (*made, *(film for films in slots.values() for film in films)) if film]


def watch(run, program, episodes, max_steps):
    """(row, Film) of each episode."""
    args, module, _ = program
    if getattr(args, "vectorization", None) == "envpool":
        args = film_envpool(args)
    found = []
    for number in range(episodes):
        reels = []
        each = 2 if hasattr(module, "as_policies") else 1  # a game in either seat
        changes = {"eval_episodes": each, "final_eval_episodes": each, "eval_seed": args.eval_seed + number}
        if hasattr(args, "eval_max_steps"):
            changes["eval_max_steps"] = min(args.eval_max_steps, max_steps)
        rows = evaluate(run, (args, *program[1:]), partial(filming, module, args, reels), **changes)
        if len(reels) != len(rows):
            fail(f"{run} cannot be filmed: its evaluation played {len(rows)} episodes, and {len(reels)} were seen")
        for row, film in zip(rows, reels):
            del film[min(row["length"], max_steps) + 1 :]  # a task that ends before its episode
            found.append((row, film))
    return found


def film_envpool(args):
    """Arguments with which envpool's environments, which draw no pictures, can be seen."""
    import envpool
    import gymnasium

    space = envpool.make(args.env_id, env_type="gymnasium", num_envs=1).observation_space
    if seen(np.zeros(space.shape, space.dtype)) is not None:
        return args
    if args.env_id not in gymnasium.registry:
        fail(f"{args.env_id} of envpool cannot be filmed: it draws no pictures, its observations are {space.shape} "
             "numbers, and Gymnasium has no environment of this name")  # fmt: skip
    print(f"envpool draws no pictures: this is Gymnasium's {args.env_id}.")
    return type(args)(**vars(args) | {"vectorization": "sync"})


# ---- Files -----------------------------------------------------------------------------------------------------------


def write(films, path, fps):
    """The films one after the other; each one's last picture stays for a second."""
    from PIL import Image

    pictures = [picture for film in films for picture in (*film, *[film[-1]] * math.ceil(fps))]
    height, width = np.max([picture.shape[:2] for picture in pictures], 0)
    height, width = height + height % 2, width + width % 2  # as MP4 needs
    padded = [np.pad(p, ((0, height - p.shape[0]), (0, width - p.shape[1]), (0, 0))) for p in pictures]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        first, *rest = map(Image.fromarray, padded)
        first.save(path, save_all=True, append_images=rest, duration=max(round(100 / fps) * 10, 20), loop=0)
    else:
        import imageio

        imageio.mimsave(path, padded, fps=fps, macro_block_size=2)


def main(options):
    if options.episodes < 1 or options.max_steps < 1 or not 0 < (options.fps or 1) <= 1000:
        fail("--episodes, --max-steps and --fps must be 1 or more, and --fps 1000 at most")
    if options.output and options.output.suffix not in (".gif", ".mp4"):
        fail(f"--output {options.output}: the name must end in .gif or .mp4")
    if "DISPLAY" not in os.environ:  # pictures without a screen
        for name, value in (("MUJOCO_GL", "egl"), ("SDL_VIDEODRIVER", "dummy"), ("SDL_AUDIODRIVER", "dummy")):
            os.environ.setdefault(name, value)
    program = load_program(options.run)
    need_policy(options.run, program, "film")
    path = options.output or options.run / "videos" / f"{program[2]['global_step']}.gif"
    films = watch(options.run, program, options.episodes, options.max_steps)
    try:
        write([film for _, film in films], path, options.fps or films[0][1].fps)
    except OSError as error:
        fail(f"{path} cannot be written: {error}. Choose another --output")
    for row, _ in films:
        names = " ".join(f"{key} {row[key]}" for key in ("split", "level", "task", "seat") if key in row)
        print(f"{names}: return {row['return']:.6g}, {row['length']} steps")
    print(f"{path} shows {len(films)} episode{'s' * (len(films) > 1)}.")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        raise SystemExit("\nstopped") from None
