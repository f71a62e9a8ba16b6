"""Fine-tuning with Hugging Face's Trainer: one callback replaces the model's norms.

The model is a small Llama with random weights and the data are random tokens, so that this runs on a CPU in
seconds. For yours: from_pretrained, and your dataset.
"""

import torch
import transformers

from evenkeel.transformers import FuseCallback

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = transformers.LlamaForCausalLM(config)
dataset = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(256, (32, 32))]

fuse = FuseCallback()
trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments("checkpoints", max_steps=8, report_to=[], save_strategy="no"),
    train_dataset=dataset,
    callbacks=[fuse],
)
trainer.train()

print(fuse.report)
# Names and shapes of the weights are as before: a checkpoint loads with evenkeel and without.
transformers.LlamaForCausalLM(config).load_state_dict(model.state_dict())
