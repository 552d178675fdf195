"""Tasks and opponents at once: a curriculum over environments beside one over co-players."""

from curricula.core import Curriculum, TupleTaskSpace


class DualCurriculum(Curriculum):
    """A task is the pair (environment's task, opponent's id): one curriculum chooses each, by its own generator.

    Every update goes to both, with each one's half of the task; the calls about opponents go to `agent_curriculum`.
    The opponent stays the same for `agent_batch_size` draws in a row, so that a learner can act for many copies of it
    in one batch.
    """

    def __init__(self, env_curriculum, agent_curriculum, *, agent_batch_size=1):
        if not hasattr(agent_curriculum, "get_opponent"):
            raise ValueError(f"agent_curriculum chooses opponents: {type(agent_curriculum).__name__} has none to give")
        if not isinstance(agent_batch_size, int) or agent_batch_size < 1:
            raise ValueError(f"agent_batch_size={agent_batch_size!r}: must be a whole number from 1")
        super().__init__(TupleTaskSpace([env_curriculum.task_space, agent_curriculum.task_space]))
        self.env_curriculum, self.agent_curriculum = env_curriculum, agent_curriculum
        for name in ("requires_step_updates", "requires_observations"):
            setattr(self, name, any(getattr(half, name, False) for half in (env_curriculum, agent_curriculum)))
        self.agent_batch_size, self._opponent, self._draws_left = agent_batch_size, None, 0

    def sample(self, k=1):
        return list(zip(self.env_curriculum.sample(k), self._opponents(k)))

    def _opponents(self, k):
        if self.agent_batch_size == 1:
            return self.agent_curriculum.sample(k)
        opponents = []
        for _ in range(k):
            # an opponent that was evicted in the middle of its batch gives way to the next
            if self._draws_left == 0 or self._opponent not in self.agent_curriculum.opponents:
                self._opponent, self._draws_left = self.agent_curriculum.sample()[0], self.agent_batch_size
            self._draws_left -= 1
            opponents.append(self._opponent)
        return opponents

    def available(self):
        return self.env_curriculum.available()

    def update_on_draw(self, tasks, env_ids):
        self.env_curriculum.update_on_draw([task[0] for task in tasks], env_ids)
        self.agent_curriculum.update_on_draw([task[1] for task in tasks], env_ids)

    def update_on_end(self, env_ids, waiting):
        self.env_curriculum.update_on_end(env_ids, waiting)
        self.agent_curriculum.update_on_end(env_ids, waiting)

    def update_task_progress(self, task, progress, env_id=None):
        self.env_curriculum.update_task_progress(task[0], progress, env_id=env_id)
        self.agent_curriculum.update_task_progress(task[1], progress, env_id=env_id)

    def update_on_step(self, task, obs, reward, terminated, truncated, info, progress, env_id=None):
        step = (obs, reward, terminated, truncated, info, progress)
        self.env_curriculum.update_on_step(task[0], *step, env_id=env_id)
        self.agent_curriculum.update_on_step(task[1], *step, env_id=env_id)

    def update_on_step_batch(self, steps, env_id=None):
        self.env_curriculum.update_on_step_batch([(task[0], *step) for task, *step in steps], env_id=env_id)
        self.agent_curriculum.update_on_step_batch([(task[1], *step) for task, *step in steps], env_id=env_id)

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.env_curriculum.update_on_episode(episode_return, length, task[0], progress, env_id=env_id)
        self.agent_curriculum.update_on_episode(episode_return, length, task[1], progress, env_id=env_id)

    def update_on_demand(self, metrics):
        self.env_curriculum.update_on_demand(metrics)
        self.agent_curriculum.update_on_demand(metrics)

    def get_opponent(self, opponent_id):
        return self.agent_curriculum.get_opponent(opponent_id)

    def update_agent(self, agent):
        return self.agent_curriculum.update_agent(agent)

    def update_winrate(self, opponent_id, result):
        self.agent_curriculum.update_winrate(opponent_id, result)

    def state_dict(self):
        batch = {"opponent": self._opponent, "draws_left": self._draws_left}
        return {"env": self.env_curriculum.state_dict(), "agent": self.agent_curriculum.state_dict(), **batch}

    def _load(self, state):
        self.env_curriculum.load_state_dict(state["env"])
        self.agent_curriculum.load_state_dict(state["agent"])
        self._opponent, self._draws_left = state["opponent"], int(state["draws_left"])

    def metrics(self):
        """Those of both, under env/ and agent/."""
        halves = {"env": self.env_curriculum, "agent": self.agent_curriculum}
        return {f"{half}/{name}": x for half, curriculum in halves.items() for name, x in curriculum.metrics().items()}
