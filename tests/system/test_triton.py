"""`saltern serve` with the Triton kernels, which their interpreter runs where no device is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cachestore.small_models import unit_model
from tests.system.scripted import Words, byte_ids
from tests.system.support import serving

# Notes in a file which implementations of the kernels a process imports: only the choice of one does.
IMPORTED_BY = """
import os, sys

def note(event, arguments):
    if event == "import" and arguments[0] in ("kernels.torch_backend", "kernels.triton_backend"):
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(f"{arguments[0]}\\n")

sys.addaudithook(note)
"""


def test_a_store_in_the_interpreter_proves_its_binding_and_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words.write(tmp_path / "model")
    model = unit_model("llama", vocab_size=259)
    model.save_pretrained(words.directory)
    tokens = byte_ids("a prompt of more than a block")
    prompt_tokens, answer_tokens = len(tokens), 4
    with torch.inference_mode():
        for _ in range(answer_tokens):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    (tmp_path / "sitecustomize.py").write_text(IMPORTED_BY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with serving(tmp_path / "data", "--model", str(words.directory), "--cache-memory", "16MiB") as server:
        assert set((tmp_path / "notes").read_text().split()) == {"kernels.triton_backend"}
        server.model = words.directory.name
        asked = {"max_tokens": answer_tokens, "ignore_eos": True, "return_token_ids": True}
        response = server.tenant().complete(tokens[:prompt_tokens], **asked)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == tokens[prompt_tokens:]
