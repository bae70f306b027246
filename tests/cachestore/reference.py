"""What transformers itself answers: run as a program, in a process that knows nothing of the store.

    python reference.py MODEL_FOLDER < prompts.json > answers.json

Greedy, fp32, transformers' own attention and cache, all prompts in one batch, eos ignored. Per prompt: the tokens, and
for each of them by how much its logit was above the second best.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

PAD = 2


def main() -> None:
    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    prompts, count = asked["prompts"], asked["tokens"]
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True).eval()
    # What a generation config leaves out is taken from the model's own.
    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(
            padded,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=PAD,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
    best = torch.stack(output.logits, dim=1).topk(2, dim=-1).values
    gaps = best[..., 0] - best[..., 1]
    json.dump({"tokens": output.sequences[:, longest:].tolist(), "gaps": gaps.tolist()}, sys.stdout)


if __name__ == "__main__":
    main()
