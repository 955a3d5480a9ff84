"""Trains the network that takes the noise off a photograph, and writes it as ONNX. Needs torch, numpy and onnx.

    python training/train_denoiser.py --data training/data/srcnn.npz --minutes 4 --out models/srcnn/1/denoise.onnx

A small DnCNN (Zhang et al., 2017): convolutions of 3 x 3, the answer is the plane less what they take for noise. It
learns on the clean photographs that srcnn_data.py cuts, with Gaussian noise of any strength up to --noise (blind), in
eight bits. One network for every plane: luminance and, as noise is there too, both colours. In the ONNX file:

    plane     FP32 [batch, 1, height, width], 0..1
    denoised  FP32 [batch, 1, height, width], about 0..1 (clip it)
"""

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from train_srcnn import follow, learning_rate, psnr, turn

DILATIONS = (1, 1, 2, 2, 1, 1)  # the receptive field has a radius of 8 pixels: upscale.overlap
WIDTH = 24
SIDE = 56  # of a training crop
STRENGTHS = (10, 15, 25, 35, 50)  # standard deviations of the noise in the test, of 255


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = [1, *[WIDTH] * (len(DILATIONS) - 1), 1]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels[index], channels[index + 1], 3, padding=dilation, dilation=dilation)
            for index, dilation in enumerate(DILATIONS)
        )
        for layer in self.convolutions:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.convolutions[-1].weight.mul_(0.01)

    def forward(self, plane: Tensor) -> Tensor:
        noise = plane
        for layer in self.convolutions[:-1]:
            noise = torch.relu(layer(noise))
        return plane - self.convolutions[-1](noise).float()


def make_noisy(clean: Tensor, strength: Tensor | float) -> Tensor:
    """Round as an eight-bit file does."""
    noisy = clean + torch.randn_like(clean) * strength / 255
    return noisy.mul(255).round().clamp(0, 255) / 255


def take_batch(photographs: Tensor, size: int, most_noise: float) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(photographs), (size,))
    top, left = (int(torch.randint(photographs.shape[-1] - SIDE + 1, ())) for _ in range(2))
    clean = photographs[chosen, :, top : top + SIDE, left : left + SIDE].float() / 255
    clean, _ = turn(clean, clean)
    # Half of a photograph is out of focus, but the training crops are sharp.
    softened = torch.rand(size, 1, 1, 1) < 0.25
    clean = torch.where(softened, nn.functional.avg_pool2d(clean, 5, 1, 2, count_include_pad=False), clean)
    return make_noisy(clean, torch.rand(size, 1, 1, 1) * most_noise), clean


def evaluate(network: nn.Module, held: Tensor, strength: float) -> tuple[float, float]:
    """Return the mean dB of the noisy and of the denoised held-out crops."""
    torch.manual_seed(7)
    theirs, ours = [], []
    with torch.no_grad():
        for clean in held:
            truth = clean[None].float() / 255
            noisy = make_noisy(truth, strength)
            theirs.append(psnr(noisy, truth))
            ours.append(psnr(network(noisy), truth))
    return float(torch.cat(theirs).mean()), float(torch.cat(ours).mean())


def train(network: nn.Module, clean: Tensor, held: Tensor, options: argparse.Namespace) -> nn.Module:
    """Return the average of the weights over the training steps, which varies less than the last weights."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.0)
    average = copy.deepcopy(network).requires_grad_(False)
    margin = sum(DILATIONS)  # zero padding affects these pixels, so they are left out
    inner = (..., slice(margin, -margin), slice(margin, -margin))
    start, began, step, report_at = time.process_time(), time.monotonic(), 0, 0.05

    def share() -> float:
        """Return the used share of the processor time, or of the longest time if other programs use the machine."""
        used, passed = time.process_time() - start, time.monotonic() - began
        return max(used / (options.minutes * 60), passed / (options.at_most * 60))

    while (progress := share()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, options.rate)
        torch.manual_seed(options.seed + step)
        noisy, original = take_batch(clean, options.batch, options.noise)
        with torch.autocast("cpu", torch.bfloat16):  # where the processor has it; channels last gave NaN
            answer = network(noisy)
        loss = (answer[inner].float() - original[inner]).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
        step += 1
        follow(average, network, min(0.999, step / (step + 10)))
        if progress >= report_at:
            before, after = evaluate(average, held[::8], 25)
            print(
                f"{progress:4.0%} step {step} loss {loss.item():.6f} at 25: {before:.2f} to {after:.2f} dB", flush=True
            )
            report_at = progress + 0.1
            onnx.save(to_onnx(average), options.out)
    return average


def to_onnx(network: Denoiser) -> onnx.ModelProto:
    nodes, weights, current = [], [], "plane"
    for index, layer in enumerate(network.convolutions, start=1):
        for suffix, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            weights.append(numpy_helper.from_array(parameter.detach().cpu().numpy(), f"conv{index}.{suffix}"))
        is_last = index == len(network.convolutions)
        name = "noise" if is_last else f"conv{index}"
        shape = {"kernel_shape": [3, 3], "pads": list(layer.padding) * 2, "dilations": list(layer.dilation)}
        inputs = [current, f"conv{index}.weight", f"conv{index}.bias"]
        nodes.append(helper.make_node("Conv", inputs, [name], name=f"Conv{index}", **shape))
        if not is_last:
            current = f"relu{index}"
            nodes.append(helper.make_node("Relu", [name], [current], name=f"Relu{index}"))
    nodes.append(helper.make_node("Sub", ["plane", "noise"], ["denoised"], name="Sub"))
    dimensions = ["batch", 1, "height", "width"]
    given, answer = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dimensions) for name in ("plane", "denoised")
    )
    graph = helper.make_graph(nodes, "denoiser", [given], [answer], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="penstock")
    model.ir_version = 8
    onnx.checker.check_model(model)
    return model


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what srcnn_data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the .onnx to write")
    parser.add_argument("--minutes", type=float, default=4.0, help="of a processor's time")
    parser.add_argument("--at-most", type=float, default=120.0, help="minutes, however little of it there is")
    parser.add_argument("--noise", type=float, default=50.0, help="the strongest, as a standard deviation of 255")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    arrays = np.load(options.data)
    clean, held = (torch.from_numpy(arrays[name]).unsqueeze(1) for name in ("original", "held_original"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    network = train(Denoiser(), clean, held, options)
    for strength in STRENGTHS:
        before, after = evaluate(network, held, strength)
        print(f"noise of {strength}: {before:.2f} dB to {after:.2f}, {after - before:+.2f}")
    onnx.save(to_onnx(network), options.out)
    print(f"wrote {options.out} ({options.out.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
