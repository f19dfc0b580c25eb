"""Adapters of PEFT trained over FP8 weights: `python -m fp8fn.examples.lora`."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fp8fn


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=2048 if gpu else 512)
    parser.add_argument("--layers", type=int, default=4 if gpu else 1)
    parser.add_argument("--tokens", type=int, default=4096 if gpu else 64)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 128,
        max_position_embeddings=args.tokens,
    )
    with torch.device(device):
        base = LlamaForCausalLM(config).bfloat16()
    print(fp8fn.quantize_weights(base, activations="fp8"))  # modules stay; weights become frozen FP8Weights

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = get_peft_model(base, adapters)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    step_of = torch.compile(model) if gpu else model  # any backend
    tokens = (torch.arange(args.tokens, device=device) % 16).expand(2, -1)
    for step in range(args.steps):
        loss = step_of(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
