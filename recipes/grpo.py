"""Train a language model by GRPO while it generates, on one copy of its weights.

    accelerate launch recipes/grpo.py                              the embedded policy on small arithmetic, in
    minutes accelerate launch recipes/grpo.py --config FILE.yaml           everything from a file; options
    override it accelerate launch recipes/grpo.py --model Qwen/Qwen3-0.6B --dataset data.jsonl --reward
    rewards.py:score

Every field of ``GRPOConfig`` is an option. Left out on purpose: tools and environments, reward models,
sharded training.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from transformers import HfArgumentParser, PrinterCallback, ProgressCallback, set_seed
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script, only recipes/ itself is on the path
    sys.path.insert(0, str(ROOT))

from recipes.launch import start_all_processes  # noqa: E402
from recipes.models import load_model_and_tokenizer  # noqa: E402
from recipes.report import ProgressReport, peak_memory_mib, print_summary  # noqa: E402
from recipes.tasks import load_task  # noqa: E402
from rlt_train.grpo import GRPOConfig, GRPOTrainer  # noqa: E402
from rlt_train.weights.fingerprint import fingerprint  # noqa: E402

CONFIGS = Path(__file__).parent / "configs"


@dataclass
class RecipeArguments:
    """What to train on what. The built-in models come with settings of their own, in ``recipes/configs``."""

    model: str = field(
        default="embedded", metadata={"help": "embedded, smollm2, a local path, or a model id on the hub."}
    )
    task: str = field(
        default="arithmetic",
        metadata={
            "help": "arithmetic, addition_chat, or reasoning_gym:NAME (extra 'tasks'). Ignored with "
            "--dataset."
        },
    )
    dataset: str | None = field(
        default=None, metadata={"help": "A file, folder or hub id with a column 'prompt', optionally :SPLIT."}
    )
    reward: str | None = field(
        default=None, metadata={"help": "exact_match, math_verify, FILE.py:FUNCTION or MODULE:FUNCTION."}
    )
    n_train: int = field(default=8192, metadata={"help": "Training problems to draw."})
    n_heldout: int = field(
        default=1000, metadata={"help": "Held-out problems that measure before and after."}
    )
    config: str | None = field(default=None, metadata={"help": "A YAML file of any of these options."})


def parse_arguments(arguments: list[str] | None = None) -> tuple[RecipeArguments, GRPOConfig]:
    """Options, then the YAML file, then defaults; unknown names fail."""
    parser = HfArgumentParser((RecipeArguments, GRPOConfig), description=__doc__, allow_abbrev=False)
    early = HfArgumentParser(RecipeArguments, add_help=False)
    first, _ = early.parse_known_args(arguments)
    path = Path(first.config) if first.config else CONFIGS / f"{first.model}.yaml"
    if first.config or path.exists():
        parser.set_defaults(**read_config(path))
    recipe, config = parser.parse_args_into_dataclasses(arguments)
    return recipe, config


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file of options.

    Raises:
        FileNotFoundError, ValueError: no such file, or a name that is no option.
    """
    values = yaml.safe_load(path.read_text()) or {}
    known = {f.name for f in (*fields(RecipeArguments), *fields(GRPOConfig))}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{path} sets {', '.join(unknown)}, which is no option of this recipe (see --help)")
    return values


def build_trainer(
    recipe: RecipeArguments, config: GRPOConfig, console: Console
) -> tuple[GRPOTrainer, ProgressReport]:
    """The trainer with rich progress in place of transformers' own."""
    model, tokenizer = load_model_and_tokenizer(recipe.model)
    task = load_task(
        recipe.task,
        dataset=recipe.dataset,
        reward=recipe.reward,
        n_train=recipe.n_train,
        n_eval=recipe.n_heldout,
        seed=config.seed,
        tokenizer=tokenizer,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=task.reward_funcs,
        args=config,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        processing_class=tokenizer,
    )
    report = ProgressReport(trainer.manager, console)
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    trainer.add_callback(report)
    return trainer, report


def heldout_reward(trainer: GRPOTrainer) -> float:
    """Mean reward of one sample a held-out problem, over all processes."""
    return trainer.evaluate(metric_key_prefix="heldout")["heldout_reward"]


def check_replicas(trainer: GRPOTrainer) -> int:
    """Compare the weights of all processes by fingerprint; returns how many there are.

    Raises:
        RuntimeError: they differ.
    """
    prints = trainer.processes.gather([fingerprint(trainer.model)])
    if len(set(prints)) != 1:
        raise RuntimeError(f"the processes' weights differ: {prints}")
    return len(prints)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns what its last line prints."""
    transformers_logging.set_verbosity_error()
    # accelerate still passes DDP the option under its older name.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    transformers_logging.disable_progress_bar()
    recipe, config = parse_arguments(arguments)
    config.disable_tqdm = True
    set_seed(config.seed)
    console = Console(quiet=config.process_index > 0)
    trainer, report = build_trainer(recipe, config, console)
    before = heldout_reward(trainer)
    console.print(f"held-out reward before training: {before:.3f}", highlight=False)
    stats = trainer.manager.stats()
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    finally:
        report.close()
    after_stats = trainer.manager.stats()
    trained = {name: after_stats[name] - stats[name] for name in stats}
    after = heldout_reward(trainer)
    replicas = check_replicas(trainer)
    trainer.save_model(config.output_dir)
    facts = report.facts
    overlap = trained["overlapping_forwards"] / max(trained["forwards"], 1)
    result = {
        "heldout_before": round(before, 4),
        "heldout_after": round(after, 4),
        "n_heldout": len(trainer.eval_dataset),
        "seconds": round(facts.seconds, 1),
        "overlap_share": round(overlap, 4),
        "versions_max_lag": facts.max_lag,
    }
    details = {
        "training time": f"{facts.seconds:.1f} s for {trainer.state.global_step} optimizer steps",
        "rollout tokens/s": f"{trained['tokens_generated'] / facts.seconds:,.0f}",
        "training tokens/s": f"{facts.trained_tokens / facts.seconds:,.0f}",
        "overlap": f"{overlap:.0%} of {trained['forwards']:,.0f} engine forwards ran while training computed",
        "staleness": f"at most {facts.max_lag} update(s)",
        "paused": f"{trained['pause_seconds']:.2f} s in all, only around optimizer steps",
        "processes": f"{replicas}, weights bit-equal" if replicas > 1 else "1",
        "peak memory": f"{peak_memory_mib():,.0f} MiB",
        "outputs": os.path.relpath(config.output_dir),
    }
    print_summary(console, result, details)
    if config.process_index == 0:
        print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    start_all_processes(__file__, sys.argv[1:])
    main()
