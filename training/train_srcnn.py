"""Trains SRCNN (Dong et al., 2014) for a scale of 2 and writes it as ONNX. Needs torch, numpy and onnx.

    python training/train_srcnn.py --data training/data/srcnn.npz --minutes 8 --out models/srcnn/1/model.onnx

The network is the paper's: three convolutions, no residual connection. It takes luminance that bicubic
interpolation has already upscaled, and answers luminance of the same size. Optimizer, initialisation and
loss weighting are of today. In the ONNX file:

    luminance     FP32 [batch, 1, height, width], 0..1
    luminance_sr  FP32 [batch, 1, height, width], about 0..1 (clip it)

Convolutions pad with zeros, so the outermost (kernels - 1) / 2 pixels are not to be trusted: give the
network a margin of real or repeated pixels and cut it off again.
"""

import argparse
import copy
import math
import time
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

CHANNELS = (1, 64, 32, 1)
SHAVE = 8  # of the held-out crops, before PSNR


def build_network(kernels: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, kernel in enumerate(kernels):
        layers.append(nn.Conv2d(CHANNELS[index], CHANNELS[index + 1], kernel, padding=kernel // 2))
        layers.append(nn.ReLU())
    network = nn.Sequential(*layers[:-1])
    start_as_identity(network)
    return network


def start_as_identity(network: nn.Sequential) -> None:
    """Channel 0 passes the image through, so that training starts at bicubic's PSNR rather than at black.

    The paper starts near zero, and trains for days.
    """
    with torch.no_grad():
        for layer in network:
            if not isinstance(layer, nn.Conv2d):
                continue
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
            if layer.out_channels == 1:
                layer.weight.mul_(0.01)
            else:  # filters that sum to zero see edges, not brightness
                layer.weight.sub_(layer.weight.mean(dim=(1, 2, 3), keepdim=True))
            middle = layer.kernel_size[0] // 2
            layer.weight[0, 0] = 0.0
            layer.weight[0, 0, middle, middle] = 1.0
            if layer.out_channels > 1:
                layer.weight[0, 1:] = 0.0


def psnr(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return dB per image, of 8-bit values, without the borders."""
    inner = (..., slice(SHAVE, -SHAVE), slice(SHAVE, -SHAVE))
    error = (estimate[inner].mul(255).round().clamp(0, 255) - truth[inner].mul(255)).square()
    return 10 * torch.log10(255**2 / error.mean(dim=(1, 2, 3)).clamp_min(1e-9))


class Photographs:
    """Load the .npz onto the device, as uint8 [n, 1, height, width]."""

    def __init__(self, path: Path, device: torch.device) -> None:
        arrays = np.load(path)
        self.upscaled = torch.from_numpy(arrays["upscaled"]).unsqueeze(1).to(device)
        self.original = torch.from_numpy(arrays["original"]).unsqueeze(1).to(device)
        self.held_upscaled = torch.from_numpy(arrays["held_upscaled"]).unsqueeze(1).to(device)
        self.held_original = torch.from_numpy(arrays["held_original"]).unsqueeze(1).to(device)
        self.held_names = [str(name) for name in arrays["held_names"]]

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.original), (size,), device=self.original.device)
        return turn(self.upscaled[chosen].float() / 255, self.original[chosen].float() / 255)


def turn(upscaled: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate and flip the squares at random."""
    turns = int(torch.randint(4, ()))
    upscaled, original = (torch.rot90(plane, turns, (2, 3)) for plane in (upscaled, original))
    if torch.rand(()) < 0.5:
        upscaled, original = upscaled.flip(3), original.flip(3)
    return upscaled, original


def evaluate(network: nn.Module, photographs: Photographs) -> tuple[Tensor, Tensor]:
    """Return the dB of bicubic and of the network for each held-out crop."""
    ours, theirs = [], []
    with torch.no_grad():
        for upscaled, original in zip(photographs.held_upscaled, photographs.held_original, strict=True):
            given, truth = upscaled[None].float() / 255, original[None].float() / 255
            ours.append(psnr(network(given), truth))
            theirs.append(psnr(given, truth))
    return torch.cat(theirs).cpu(), torch.cat(ours).cpu()


def learning_rate(progress: float, peak: float) -> float:
    """Raise the learning rate over the first 2%, then lower it along a cosine to a hundredth."""
    if progress < 0.02:
        return peak * progress / 0.02
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98)))


def train(network: nn.Module, photographs: Photographs, options: argparse.Namespace) -> nn.Module:
    """Return the average of the weights over the training steps, which varies less than the last weights."""
    margin = sum(kernel // 2 for kernel in options.kernels)  # zero padding affects these pixels, so they are left out
    inner = (..., slice(margin, -margin), slice(margin, -margin))
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.0)
    average = copy.deepcopy(network).requires_grad_(False)
    start, step, report_at = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - start) / (options.minutes * 60)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, options.rate)
        upscaled, original = photographs.batch(options.batch)
        loss = (network(upscaled)[inner] - original[inner]).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
        step += 1
        follow(average, network, min(0.999, step / (step + 10)))
        if progress >= report_at:
            theirs, ours = evaluate(average, photographs)
            gain = float((ours - theirs).mean())
            print(f"{progress:4.0%} step {step} loss {loss.item():.6f} gain {gain:+.3f} dB", flush=True)
            report_at = progress + 0.1
    return average


def follow(average: nn.Module, network: nn.Module, decay: float) -> None:
    with torch.no_grad():
        for kept, new in zip(average.parameters(), network.parameters(), strict=True):
            kept.lerp_(new, 1 - decay)


def to_onnx(network: nn.Sequential) -> onnx.ModelProto:
    """Build the ONNX graph from the weights, without an exporter."""
    nodes, weights, current = [], [], "luminance"
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    for index, layer in enumerate(convolutions, start=1):
        for suffix, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            weights.append(numpy_helper.from_array(parameter.detach().cpu().numpy(), f"conv{index}.{suffix}"))
        is_last = index == len(convolutions)
        name = "luminance_sr" if is_last else f"conv{index}"
        pads = [layer.kernel_size[0] // 2] * 4
        shape = list(layer.kernel_size)
        inputs = [current, f"conv{index}.weight", f"conv{index}.bias"]
        nodes.append(helper.make_node("Conv", inputs, [name], name=f"Conv{index}", kernel_shape=shape, pads=pads))
        current = name
        if not is_last:
            current = f"relu{index}"
            nodes.append(helper.make_node("Relu", [name], [current], name=f"Relu{index}"))
    dimensions = ["batch", 1, "height", "width"]
    given = helper.make_tensor_value_info("luminance", TensorProto.FLOAT, dimensions)
    answer = helper.make_tensor_value_info("luminance_sr", TensorProto.FLOAT, dimensions)
    graph = helper.make_graph(nodes, "srcnn", [given], [answer], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="penstock")
    model.ir_version = 8  # the newest version that runtimes of opset 17's time read
    onnx.checker.check_model(model)
    return model


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what srcnn_data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the .onnx to write")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--kernels", default="9-5-5", help="9-5-5 or 9-1-5, the paper's two")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, where there is no GPU")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.kernels = tuple(int(kernel) for kernel in options.kernels.split("-"))
    return options


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    photographs = Photographs(options.data, device)
    network = build_network(options.kernels).to(device)
    network = train(network, photographs, options)
    theirs, ours = evaluate(network, photographs)
    for name, bicubic, srcnn in zip(photographs.held_names, theirs.tolist(), ours.tolist(), strict=True):
        print(f"{name:40s} bicubic {bicubic:6.2f} dB  srcnn {srcnn:6.2f} dB  {srcnn - bicubic:+.2f}")
    print(f"mean: bicubic {theirs.mean():.3f} dB, srcnn {ours.mean():.3f} dB, {(ours - theirs).mean():+.3f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(network.cpu()), options.out)
    print(f"wrote {options.out} ({options.out.stat().st_size / 1e3:.0f} kB), trained on {device}")


if __name__ == "__main__":
    main()
