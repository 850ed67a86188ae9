"""GRPO on ``transformers.Trainer``: rollouts, rewards, advantages, losses and the trainer that ties them
together."""

from rlt_train.grpo.config import GRPOConfig
from rlt_train.grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
