"""MooreEval: a verifier that builds, runs, judges and times native kernels outside the judge's process."""

from musalib.mooreeval.config import EvalConfig
from musalib.mooreeval.evaluator import MooreEval
from musalib.mooreeval.feedback import feedback

__all__ = ["EvalConfig", "MooreEval", "feedback"]
