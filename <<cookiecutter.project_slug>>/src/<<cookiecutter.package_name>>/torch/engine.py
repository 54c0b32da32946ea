"""PyTorch behind the engine protocol: model, optimizer, precision, device and random generators of one rank."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ..data import Dataset, normalizer
from ..engine import NO_RANK, Hooks, Sums, check_finite
from ..errors import UserError
from ..ranks import Bytes, Communicator
from ..sampler import Indices, Share
from ..seeds import host_state, load_host_state, seed_host
from ..weights import FILE, check_shapes, hash_arrays, report_shapes
from .loader import Tensors, read_batches, read_shares
from .reducer import Reducer, averaged, broadcast_model

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(config: Any, communicator: Communicator) -> TorchEngine:
    """The engine that a composed config describes; the same weights on every rank.

    Raises:
        UserError: for a device, precision, model or optimizer that cannot be had.
    """
    device = communicator.together(lambda: _pick_device(config.device, communicator.local_rank), "device")
    communicator.check_gpus(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None)
    threads = communicator.threads_per_rank()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    model = communicator.together(lambda: _make_model(config, communicator, device), "model")
    broadcast_model(model, communicator)
    if config.channels_last:  # Horovod broadcasts contiguous tensors only
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return communicator.together(lambda: TorchEngine(config, communicator, model, device), "engine")


class TorchEngine:
    """See engine.Engine for what each method promises."""

    def __init__(self, config: Any, communicator: Communicator, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.communicator = communicator
        self.optimizer: torch.optim.Optimizer = instantiate(config.optimizer, _partial_=True)(model.parameters())
        horovod = config.horovod
        self._compression = str(horovod.compression)
        self.reducer = Reducer(
            model,
            communicator,
            compression=horovod.compression,
            op=horovod.op,
            predivide_factor=horovod.predivide_factor,
            groups=horovod.groups,
            rank=horovod.get("powersgd_rank", 4),
        )
        self.hooks = Hooks()
        self._own_mean = horovod.op == "adasum"
        self._forward = torch.compile(model) if config.compile else model
        self._dtype = PRECISIONS[config.precision]
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self._channels_last = config.channels_last
        self._normalize = normalizer(
            config.data.normalize, torch.uint8, Tensor.float, lambda array: torch.from_numpy(array).to(device)
        )
        self._smoothing = float(config.label_smoothing)
        self._clip_norm = math.inf if config.clip_norm is None else float(config.clip_norm)
        self._skip_bad_steps = config.on_nan == "skip"
        self._workers = int(config.data.workers)
        self._copies = HostCopies(device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._count = 0

    def train_batches(self, dataset: Dataset, shares: Iterator[Share]) -> Iterator[tuple[Share, list[Tensors]]]:
        """Batches as one pair of tensors for each accumulation pass."""
        return read_shares(dataset, shares, self._workers, pin=self.device.type == "cuda")

    def train_step(self, share: Share, batch: list[Tensors], learning_rate: float) -> None:
        """Backward over all passes, reduction, update."""
        self.model.train()
        statistics = [buffer.clone() for buffer in self.model.buffers()] if self._skip_bad_steps else []
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, count = torch.zeros_like(self._loss), sum(len(labels) for _, labels in batch)
        weight = 1 / (max(count, 1) if self._own_mean else share.global_count)
        for index, (inputs, labels) in enumerate(batch):
            self.reducer.start(last=index == len(batch) - 1)
            if len(labels):
                loss += self._backward(inputs, labels, weight)
        self.reducer.finish()
        if self._update():
            self._loss += loss
            self._count += count
        else:
            for buffer, before in zip(self.model.buffers(), statistics, strict=True):
                buffer.copy_(before)
        self.reducer.clear()
        self.hooks.after_step(share)

    def _backward(self, inputs: Tensor, labels: Tensor, weight: float) -> Tensor:
        with self._autocast():
            images = self._to_device(inputs)
            outputs = self._forward(images)
            plain = functional.cross_entropy(
                outputs, self._labels(labels), reduction="sum", label_smoothing=self._smoothing
            )
            loss: Tensor = self.hooks.loss(plain, images, outputs)
        self._scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self) -> bool:
        self._scaler.unscale_(self.optimizer)
        if self._skip_bad_steps or self._clip_norm < math.inf:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            # The reduced gradients are the same everywhere, so all ranks skip the same steps.
            if self._skip_bad_steps and not torch.isfinite(norm):
                self._scaler.update()
                return False
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return True

    def train_sums(self) -> Sums:
        """Read the running loss; this is the place that waits for the device."""
        sums = Sums(loss=self._loss.item(), count=self._count)
        self._loss.zero_()
        self._count = 0
        return sums

    @torch.no_grad()
    def evaluate(self, dataset: Dataset, batches: Iterable[Indices]) -> Sums:
        """Loss without label smoothing, and correct answers, over this rank's batches."""
        self.model.eval()
        loss, correct, count = torch.zeros_like(self._loss), torch.zeros_like(self._loss), 0
        with self._merged_statistics():
            for inputs, labels in read_batches(dataset, batches, self._workers, pin=self.device.type == "cuda"):
                if not len(labels):
                    continue
                with self._autocast():
                    outputs = self._forward(self._to_device(inputs))
                answers = self._labels(labels)
                loss += functional.cross_entropy(outputs.float(), answers, reduction="sum")
                correct += (outputs.argmax(dim=1) == answers).sum()
                count += len(labels)
        return Sums(loss.item(), correct.item(), count)

    def statistics(self) -> dict[str, Tensor]:
        """Batch-norm statistics and ranges of all ranks."""
        buffers = dict(self.model.named_buffers())
        means = averaged(buffers.values(), self.communicator, "statistics")
        return dict(zip(buffers, means, strict=True)) | merged_buffers(self.model, self.communicator)

    def shared_state(self, statistics: dict[str, Tensor]) -> Callable[[Path], None]:
        """Copy weights, optimizer and scaler to the host; the weights get the statistics of all ranks."""
        weights = self._copies.take("weights", dict(self.model.named_parameters()))
        weights |= {name: tensor.cpu() for name, tensor in statistics.items()}
        training = {
            "optimizer": self._copies.take("optimizer", self.optimizer.state_dict()),
            "scaler": self._scaler.state_dict(),
        }
        self._copies.wait()
        finite = all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())
        check_finite(finite, self._compression)

        def write(folder: Path) -> None:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / FILE)
            torch.save(training, folder / "optimizer.pt")

        return write

    @torch.no_grad()
    def load_shared_state(self, folder: Path) -> None:
        """Load on every rank: a broadcast of optimizer state would make fresh optimizers take a step."""
        training = _load_plain(folder / "optimizer.pt")
        own, saved = self._tensors(), _load_tensors(folder / FILE, self.device)
        check_shapes(_shapes(own), _shapes(saved))
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        options = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(training["optimizer"])
        for group, wanted in zip(self.optimizer.param_groups, options, strict=True):
            group.update(wanted)  # the config decides, as when a run begins
        if training["scaler"]:
            self._scaler.load_state_dict(training["scaler"])

    def rank_state(self) -> Bytes:
        """Random generators and running statistics of this rank, as tensors and plain types."""
        state = {
            **host_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "buffers": {name: buffer.cpu() for name, buffer in self.model.named_buffers()},
            "sums": (self._loss.item(), self._count),
            "reducer": self.reducer.state(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def load_rank_state(self, file: Path) -> None:
        """Take what rank_state() gave; the generator of a GPU only where there is one."""
        state = _load_plain(file)
        load_host_state(state)
        self.reducer.load_state(state.get("reducer", {}))
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self._set_sums([state["sums"]])

    def load_sums(self, files: list[Path]) -> None:
        """The files may be as large as the model: only what is looked at is read."""
        self._set_sums([_load_plain(file, mmap=True)["sums"] for file in files])

    def _set_sums(self, sums: list[tuple[float, int]]) -> None:
        self._loss.fill_(sum(loss for loss, _ in sums))
        self._count = sum(count for _, count in sums)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> dict[str, str]:
        """Copy each tensor whose name and shape fit; the others keep their initial values."""
        own, saved = self._tensors(), _load_tensors(folder / FILE, self.device)
        report = report_shapes(_shapes(own), _shapes(saved))
        for name, what in report.items():
            if what == "loaded":
                own[name].copy_(saved[name])
        return report

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def fingerprint(self) -> str:
        """SHA-256 over the parameters' bytes, in the model's order."""
        parameters = (parameter.detach().cpu().contiguous() for parameter in self.model.parameters())
        return hash_arrays(parameter.flatten().view(torch.uint8).numpy() for parameter in parameters)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _labels(self, labels: Tensor) -> Tensor:
        return labels.to(self.device, non_blocking=True)

    def _to_device(self, inputs: Tensor) -> Tensor:
        inputs = self._normalize(inputs.to(self.device, non_blocking=True))
        if inputs.dim() != 4:
            return inputs
        images = inputs.permute(0, 3, 1, 2)  # is channels-last in memory as it stands
        return images if self._channels_last else images.contiguous()

    @contextmanager
    def _merged_statistics(self) -> Iterator[None]:
        """Evaluate with the batch-norm statistics and ranges of all ranks, then train on with this rank's own."""
        buffers = dict(self.model.named_buffers())
        own = [buffer.clone() for buffer in buffers.values()]
        for name, merged in self.statistics().items():
            buffers[name].copy_(merged)
        try:
            yield
        finally:
            for buffer, value in zip(buffers.values(), own, strict=True):
                buffer.copy_(value)


class HostCopies:
    """Copies of tensors in host memory that is kept and used again: fresh memory costs more than the copying."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, state: Any) -> Any:
        """A copy of nested dicts and lists in which every tensor is a copy, whole after wait()."""
        if isinstance(state, dict):
            return {key: self.take(f"{name}.{key}", value) for key, value in state.items()}
        if isinstance(state, list):
            return [self.take(f"{name}.{index}", value) for index, value in enumerate(state)]
        return self._copy(name, state.detach()) if isinstance(state, Tensor) else state

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            # Pinned memory lets the GPU copy by itself.
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
            self._kept[name] = kept
        return kept.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies that a GPU still makes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _seed(seed: int) -> None:
    seed_host(seed)
    torch.manual_seed(seed)


def _make_model(config: Any, communicator: Communicator, device: torch.device) -> nn.Module:
    """The model on its device, from the same seed on every rank; afterwards each rank draws its own numbers."""
    if config.precision == "fp16" and device.type != "cuda":
        raise UserError("precision=fp16 needs a GPU: use bf16 or fp32 on the CPU")
    _seed(config.seed)
    model: nn.Module = instantiate(config.model)
    if config.sync_batch_norm:
        model = _synchronize_batch_norm(model, communicator, device)
    _seed(config.seed + 1 + communicator.rank)
    return model.to(device)


def _pick_device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda but PyTorch sees no GPU: check nvidia-smi and the CUDA build, or use device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show each rank one GPU of its own; then all are number 0.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _synchronize_batch_norm(model: nn.Module, communicator: Communicator, device: torch.device) -> nn.Module:
    """Replace batch-norm layers by Horovod's, which take mean and variance over all ranks' samples."""
    if device.type != "cuda":
        raise UserError("sync_batch_norm=true needs GPUs: leave it false; running statistics are averaged then")
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            layer = communicator.hvd.SyncBatchNorm(child.num_features, child.eps, child.momentum, child.affine)
            layer.load_state_dict(child.state_dict())
            setattr(model, name, layer)
        else:
            _synchronize_batch_norm(child, communicator, device)
    return model


def _load_plain(file: Path, *, mmap: bool = False) -> Any:
    """A file of tensors and plain values; one that wants more, as a harmful pickle does, is not loaded."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise UserError(NO_RANK.format(file)) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{file} holds more than tensors and plain values, or less: resume from another") from error


def _load_tensors(file: Path, device: torch.device) -> dict[str, Tensor]:
    try:
        return load_file(file, device=str(device))
    except SafetensorError as error:
        raise UserError(f"{file} is no safetensors file ({error}): use another checkpoint") from error


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def merged_buffers(model: nn.Module, communicator: Communicator) -> dict[str, Tensor]:
    """Those of which a mean over the ranks is wrong, such as ranges: modules with such a method say how they merge."""
    kinds: set[Any] = {type(part) for part in model.modules() if hasattr(part, "merged_buffers")}
    return {name: buffer for kind in kinds for name, buffer in kind.merged_buffers(model, communicator).items()}
