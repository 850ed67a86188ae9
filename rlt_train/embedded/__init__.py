"""The embedded default task and policy: everything that a demonstration needs without a download."""

from rlt_train.embedded.arithmetic import (
    HELD_OUT_PROBLEMS,
    MAX_ANSWER_TOKENS,
    exact_match_reward,
    held_out_problems,
    load_dataset,
    make_problems,
    split_of,
)
from rlt_train.embedded.evaluation import Accuracy, measure_accuracy
from rlt_train.embedded.policy import load_policy, load_tokenizer, policy_path

__all__ = [
    "HELD_OUT_PROBLEMS",
    "MAX_ANSWER_TOKENS",
    "Accuracy",
    "exact_match_reward",
    "held_out_problems",
    "load_dataset",
    "load_policy",
    "load_tokenizer",
    "make_problems",
    "measure_accuracy",
    "policy_path",
    "split_of",
]
