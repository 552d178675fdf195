"""PLR for a trainer that hands over nothing: the environments' steps are scored by a copy of its agent."""

import copy

import gymnasium as gym
import numpy as np

from curricula.plr import PrioritizedLevelReplay


def stacked(observations):
    """Observations (arrays, or dicts and tuples of them) as one batch with a new first axis."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stacked([obs[key] for obs in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([obs[i] for obs in observations]) for i in range(len(first)))
    return np.stack(observations)


def as_array(x):
    """A numpy array or a torch tensor, on any device and with gradients, as float64."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x, np.float64)


class AsyncPrioritizedLevelReplay(PrioritizedLevelReplay):
    """Prioritized level replay that scores each finished episode whole, from its steps.

    `get_value(agent, obs)` takes a batch of B observations and returns values (B,), or for the scores that read the
    policy (values, logits (B, A)). It sees a deep copy of `agent`, so that training never changes what a score is made
    with; `update_agent(agent)` renews the copy. Values are computed for `num_steps` observations at a time: no more of
    them are kept. An episode that is cut off counts as truncated, one whose process was killed not at all. Where a task
    is completed within an episode its part ends there, terminated; where the environment changes it, truncated. The
    central form, for a trainer that computes values anyway, is PrioritizedLevelReplay.update_from_rollout; both score
    the same episode alike.

    robust=True is PLR-perp (arXiv:2110.02439): `play(agent, task) -> steps`, in environments of its own, plays a whole
    episode of an encoded task, and `sample` gives it every new level, so that only replayed ones are trained on. The
    first draw then plays a share `rho` of all levels. steps are those of Curriculum.update_on_step_batch, the last
    one's info with "final_obs".

    state_dict() holds neither the agent nor the episodes underway.
    """

    requires_step_updates = True
    requires_observations = True

    def __init__(self, task_space, agent, get_value, *, gamma=0.999, gae_lambda=0.95, num_steps=256, play=None,
                 **plr):  # fmt: skip
        super().__init__(task_space, **plr)
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps!r}: at least 1 observation is needed for a value")
        if self.robust != (play is not None):
            raise ValueError(f"robust={self.robust}, play={play!r}: robust PLR, and it alone, plays new levels itself")
        space = getattr(task_space, "gym_space", ())
        nested = isinstance(space, gym.spaces.Tuple) and not all(
            isinstance(part, gym.spaces.Discrete) for part in space
        )
        if nested or isinstance(space, gym.spaces.Dict):
            raise ValueError(
                f"levels are numbers or rows of them, found {task_space!r}: use TaskSpace(list of its tasks)"
            )
        self.get_value, self.gamma, self.gae_lambda, self.num_steps, self.play = (
            get_value, gamma, gae_lambda, num_steps, play)  # fmt: skip
        self._underway = {}  # env_id -> its episode: level, observations without a value, values, logits, rewards
        self.update_agent(agent)

    def update_agent(self, agent):
        self._agent = copy.deepcopy(agent)

    def sample(self, k=1):
        if not self.robust:
            return super().sample(k)
        tasks = []
        for _ in range(k):
            while self.is_unseen(task := super().sample()[0]):
                steps = self.play(self._agent, task)
                self.update_on_step_batch(steps, env_id="play")
                if "play" in self._underway or not steps:
                    raise ValueError(f"play(agent, {task!r}) returned no whole episode: its last step must end it")
            tasks.append(task)
        return tasks

    def update_on_step(self, task, obs, reward, terminated, truncated, info, progress, env_id=None):
        level = self._index(task)
        if env_id in self._underway and self._underway[env_id]["level"] != level:
            self._end(env_id, False, obs)
        new = {"level": level, "obs": [], "values": [], "logits": [], "rewards": []}
        episode = self._underway.setdefault(env_id, new)
        episode["last"] = obs
        episode["obs"].append(obs)
        episode["rewards"].append(float(reward))
        if terminated or truncated:
            if info.get("final_obs") is None:
                raise ValueError(f"an episode of task {task!r} ended without info['final_obs']")
            self._end(env_id, bool(terminated), info["final_obs"])
        elif len(episode["obs"]) == self.num_steps:
            self._value(episode)

    def update_task_progress(self, task, progress, env_id=None):
        if progress >= 1 and env_id in self._underway:
            self._end(env_id, True, self._underway[env_id]["last"])  # any observation: nothing follows in this task

    def update_on_end(self, env_ids, waiting):
        for env_id in env_ids:
            self._underway.pop(env_id, None)

    def _end(self, env_id, terminated, final_obs):
        episode = self._underway.pop(env_id)
        episode["obs"].append(final_obs)
        self._value(episode)
        steps = len(episode["rewards"])
        rewards, values = np.array(episode["rewards"])[:, None], np.concatenate(episode["values"])[:, None]
        logits = np.concatenate(episode["logits"])[:-1, None] if episode["logits"] else None
        dones = np.zeros((steps + 1, 1), bool)
        dones[0] = dones[-1] = True
        task = np.asarray(self._encoding(episode["level"]))
        self.update_from_rollout(
            np.broadcast_to(task, (steps, 1, *task.shape)), rewards, values, logits, dones, self.gamma,
            self.gae_lambda, next_values=values[1:], terminated=dones[1:] & terminated,
        )  # fmt: skip

    def _value(self, episode):
        """Values, and logits if there are any, in place of the waiting observations."""
        answer, count = self.get_value(self._agent, stacked(episode["obs"])), len(episode["obs"])
        values, *logits = map(as_array, answer if isinstance(answer, tuple) else (answer,))
        for x in (values, *logits):
            if len(x) != count or values.ndim != 1:
                raise ValueError(f"get_value returned shape {x.shape} for {count} observations: must be ({count}, ...)")
        episode["values"].append(values)
        episode["logits"] += logits
        episode["obs"].clear()
