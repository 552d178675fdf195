"""Curricula for any trainer: import them into your own loop, or copy them into one file.

Wrappers for single environment packages are in curricula.task_wrappers, the synchronisation over Ray in
curricula.ray_sync.
"""

from curricula.annealing import ExpandingBox, SimulatedAnnealing
from curricula.core import (
    BoxTaskSpace,
    Curriculum,
    DiscreteTaskSpace,
    MultiDiscreteTaskSpace,
    PettingZooTaskWrapper,
    TaskSpace,
    TaskWrapper,
    TupleTaskSpace,
)
from curricula.domain_randomization import BatchedDomainRandomization, DomainRandomization
from curricula.dual import DualCurriculum
from curricula.learning_progress import Learnability, LearningProgress, OnlineLearningProgress
from curricula.manual import Constant, Manual
from curricula.omni import OMNI
from curricula.plr import PrioritizedLevelReplay
from curricula.plr_async import AsyncPrioritizedLevelReplay
from curricula.self_play import FictitiousSelfPlay, LeaguePlay, PrioritizedFictitiousSelfPlay, SelfPlay
from curricula.sequential import SequentialCurriculum
from curricula.sync import SyncQueue
from curricula.sync_envs import GymnasiumSyncWrapper, PettingZooSyncWrapper
from curricula.sync_learner import make_multiprocessing_curriculum
from curricula.taper import TaskPrioritizedReplay

__all__ = [
    "AsyncPrioritizedLevelReplay",
    "BatchedDomainRandomization",
    "BoxTaskSpace",
    "Constant",
    "Curriculum",
    "DiscreteTaskSpace",
    "DomainRandomization",
    "DualCurriculum",
    "ExpandingBox",
    "FictitiousSelfPlay",
    "GymnasiumSyncWrapper",
    "LeaguePlay",
    "Learnability",
    "LearningProgress",
    "Manual",
    "MultiDiscreteTaskSpace",
    "OMNI",
    "OnlineLearningProgress",
    "PettingZooSyncWrapper",
    "PettingZooTaskWrapper",
    "PrioritizedFictitiousSelfPlay",
    "PrioritizedLevelReplay",
    "SelfPlay",
    "SequentialCurriculum",
    "SimulatedAnnealing",
    "SyncQueue",
    "TaskPrioritizedReplay",
    "TaskSpace",
    "TaskWrapper",
    "TupleTaskSpace",
    "make_multiprocessing_curriculum",
]
