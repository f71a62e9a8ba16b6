"""One training step of a diffusion U-Net (diffusers): predict the noise that was added to an image.

fuse replaces the group norms and layer norms in place; each group norm with the SiLU behind it can be one kernel
where they are neighbours in an nn.Sequential. Everything is channels last, as convolutions like it best, and stays so.
A small U-Net with random weights and images, so that this runs on a CPU in seconds.
"""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

import evenkeel.torch as ek

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=32,
    layers_per_block=1,
    norm_num_groups=8,
)
unet.to(memory_format=torch.channels_last)
report = ek.fuse(unet)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
scheduler = DDPMScheduler()

images = torch.randn(2, 4, 16, 16).contiguous(memory_format=torch.channels_last)
text = torch.randn(2, 8, 32)
noise = torch.randn_like(images)
times = torch.randint(scheduler.config.num_train_timesteps, (2,))

with torch.autocast("cpu", torch.bfloat16):
    predicted = unet(scheduler.add_noise(images, noise, times), times, text).sample
loss = torch.nn.functional.mse_loss(predicted.float(), noise)
loss.backward()
optimizer.step()

print(report)
print(f"loss {loss.item():.3f}")
