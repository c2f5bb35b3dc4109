"""Exit policies: when an input may leave; `base.py` holds the contract, one file per kind beside it."""

from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.patience import PatiencePolicy
from earlyexit.policies.recorded import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy, ThresholdPolicy
from earlyexit.policies.voting import VotingPolicy
from earlyexit.policies.wrapper import exit_wrapper

__all__ = [
    "ConfidencePolicy",
    "EntropyPolicy",
    "ExitPolicy",
    "Opinion",
    "PatiencePolicy",
    "RecordedAnswers",
    "RecordedPolicy",
    "ThresholdPolicy",
    "Verdict",
    "VotingPolicy",
    "exit_wrapper",
]
