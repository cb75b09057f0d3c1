"""Turns the GGUF file of SmolLM2-135M-Instruct into a folder that vLLM serves, and asks it one question as a check.

python convert_demo.py GGUF_FILE TARGET_FOLDER
"""

import sys
from pathlib import Path

QUESTION, ANSWER = "What is the capital of France?", "Paris"


def main(source: Path, target: Path) -> None:
    """Saves weights in bfloat16, the tokenizer and its chat template."""
    from transformers import (  # type: ignore[import-not-found,unused-ignore]
        AutoModelForCausalLM,
        AutoTokenizer,
        GgufConfig,
    )

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        sys.exit(f"{source.name} holds no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
    )
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    answer = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if ANSWER not in answer:
        sys.exit(f"the converted model answers {QUESTION!r} with {answer!r}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{QUESTION} {answer.strip()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
