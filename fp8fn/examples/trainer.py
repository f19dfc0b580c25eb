"""transformers' `Trainer` with products in FP8: `python -m fp8fn.examples.trainer`."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=2048 if gpu else 512)
    parser.add_argument("--layers", type=int, default=4 if gpu else 1)
    parser.add_argument("--tokens", type=int, default=4096 if gpu else 32)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
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
    model = LlamaForCausalLM(config)
    model.compile(backend="fp8fn")  # the one line; `torch_compile_backend=` takes PyTorch's own backends only

    tokens = torch.arange(args.tokens) % 16
    dataset = [{"input_ids": tokens, "labels": tokens} for _ in range(2 * args.steps)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            learning_rate=1e-4,
            bf16=True,
            use_cpu=not gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
