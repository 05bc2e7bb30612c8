"""MusaCoder as a library: tasks, verdicts, rewards, stabilisers, training. See README.md."""

from musalib.reward import RewardConfig, group_advantages, reward
from musalib.tasks import Task, TaskError
from musalib.verdict import Verdict

__version__ = "0.1.0"
__all__ = ["RewardConfig", "Task", "TaskError", "Verdict", "group_advantages", "reward"]
