"""From what the operator calls a model to a folder on this disk."""

from __future__ import annotations

import re
from pathlib import Path

from cachestore import default_model
from cachestore.start_error import ModelError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

# Weights as safetensors, and the JSON and text beside them; what lies in folders is other formats of the same.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]


def resolve(model: str | None) -> Path:
    """The folder of `model`: None or its name is the default model, then a local folder, then an id on the hub.

    What begins with `/`, `.` or `~`, or can be no hub id, is a path and costs no look at a network.

    Raises:
        ModelError: it is nowhere.
    """
    if model is None or model.lower() == default_model.NAME:
        return default_model.ensure()
    path = Path(model).expanduser()
    if path.exists() or model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        if not path.exists():
            raise ModelError(f"{path} does not exist: name a model folder in Hugging Face format, or a hub id")
        return path.absolute()
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    # Not needed for a local folder, and a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise ModelError(f"{model} on the hub asks for its terms to be accepted: do that, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{model} is no folder here and no public model on the hub: check the name") from error
    except Exception as error:  # its client lets HTTP, socket, cache and validation errors of many kinds through
        raise ModelError(
            f"{model} is no folder here, and the hub could not be asked ({type(error).__name__}): "
            "check the network, or give the path of a model folder"
        ) from error
