"""Curricula for any trainer: import them into your own loop, or copy them into one file."""

from curricula.core import Curriculum, TaskSpace, TaskWrapper
from curricula.domain_randomization import DomainRandomization
from curricula.plr import PrioritizedLevelReplay
from curricula.sync import SyncQueue

__all__ = ["Curriculum", "DomainRandomization", "PrioritizedLevelReplay", "SyncQueue", "TaskSpace", "TaskWrapper"]
