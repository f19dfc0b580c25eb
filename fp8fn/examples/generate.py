"""transformers' `generate` from an FP8 checkpoint: `python -m fp8fn.examples.generate [FOLDER]`.

Without a folder, a small random model is saved, converted by `python -m fp8fn convert`, and loaded.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8fn
from fp8fn import cli


def random_checkpoint(folder: Path) -> Path:
    """A small model in bfloat16, and the same one in FP8, whose folder is returned."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "bf16")
    assert cli.main(["convert", str(folder / "bf16"), str(folder / "fp8"), "--block", "128,128"]) == 0
    return folder / "fp8"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or random_checkpoint(Path(temporary))
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config = None  # fp8fn reads the weights, not transformers
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        report = fp8fn.load_weights(model, folder, device=device)
    weights = [p for p in model.parameters() if isinstance(p, fp8fn.FP8Weight)]
    print(f"{len(weights)} weights in FP8; missing {report.missing_keys}")
    prompt, options = torch.arange(1, 9, device=device).unsqueeze(0), {}
    if device == "cuda":
        options = {"cache_implementation": "static", "custom_generate": fp8fn.decoding_loop}
    out = model.eval().generate(prompt, max_new_tokens=args.new_tokens, do_sample=False, pad_token_id=0, **options)
    print("tokens", *out[0].tolist())


if __name__ == "__main__":
    main()
