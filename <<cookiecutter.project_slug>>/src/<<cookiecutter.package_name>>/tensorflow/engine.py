"""TensorFlow behind the engine protocol: Keras model, optimizer, precision, device and generators of one rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as pack

from ..data import Dataset, normalizer
from ..engine import NO_RANK, Hooks, Sums, check_finite
from ..errors import UserError
from ..gpus import gpu_name
from ..ranks import Bytes, Communicator
from ..sampler import Indices, Share
from ..seeds import host_state, load_host_state, seed_host
from ..weights import FILE, check_shapes, hash_arrays, report_shapes
from .batch_norm import synchronize
from .loader import Tensors, read_batches, read_shares
from .optimizer import SteadySGD
from .reducer import Reducer, averaged, broadcast_variables
from .variables import (
    OPTIMIZER,
    Arrays,
    assign,
    copies,
    is_generator,
    local_variables,
    named,
    optimizer_variables,
    read,
    shapes,
    statistics,
    write,
)

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
PLAIN, GENERATOR = "state", "tensorflow"  # of a rank's file: the key of its JSON, the name of TensorFlow's generator


def build(config: Any, communicator: Communicator) -> TensorFlowEngine:
    """The engine that a composed config describes; the same weights on every rank.

    Raises:
        UserError: for a device, precision, model or optimizer that cannot be had.
    """
    gpu, fault = _claim_device(config.device, communicator)  # before TensorFlow runs anything
    communicator.together(lambda: _raise(fault), "device")
    communicator.check_gpus(gpu)
    model = communicator.together(lambda: _make_model(config, communicator), "model")
    if communicator.size > 1:
        broadcast_variables(named(model).values())
    return communicator.together(lambda: TensorFlowEngine(config, communicator, model), "engine")


class TensorFlowEngine:
    """See engine.Engine for what each method promises."""

    def __init__(self, config: Any, communicator: Communicator, model: keras.Model) -> None:
        self.model = model
        self.communicator = communicator
        self.optimizer = _make_optimizer(config)
        self.optimizer.build(model.trainable_variables)
        horovod = config.horovod
        self._compression = str(horovod.compression)
        self.reducer = Reducer(
            op="adasum" if horovod.op == "adasum" else "sum",
            compression=horovod.compression,
            predivide_factor=horovod.predivide_factor,
            groups=horovod.groups,
        )
        self.hooks = Hooks()
        self._own_mean = horovod.op == "adasum"
        self._shape = tuple(config.data.shape)
        self._normalize = normalizer(config.data.normalize, tf.uint8, lambda inputs: tf.cast(inputs, tf.float32))
        self._smoothing = float(config.label_smoothing)
        self._skip_bad_steps = config.on_nan == "skip"
        self._workers = int(config.data.workers)
        self._local = local_variables(model)
        self._loss = tf.Variable(0.0, dtype=tf.float64)
        self._count = tf.Variable(0, dtype=tf.int64)
        accumulates = horovod.accumulation > 1
        self._sums = [tf.Variable(tf.zeros_like(v.value)) for v in model.trainable_variables] if accumulates else []
        watched = self._watched() if self._skip_bad_steps else []
        self._kept = [tf.Variable(tf.convert_to_tensor(one)) for one in watched]
        self._graphs: dict[tf.DType, _Graphs] = {}
        self._finish = tf.function(self._finish_step, input_signature=[tf.TensorSpec(())], jit_compile=False)

    def train_batches(self, dataset: Dataset, shares: Iterator[Share]) -> Iterator[tuple[Share, list[Tensors]]]:
        """Batches as one pair of tensors for each accumulation pass."""
        return read_shares(dataset, shares, self._workers)

    def train_step(self, share: Share, batch: list[Tensors], learning_rate: float) -> None:
        """Backward over all passes, reduction, update; one graph if there is one pass."""
        graphs = self._graphs_for(batch[0][0].dtype)
        count = sum(len(labels) for _, labels in batch)
        weight = 1 / (max(count, 1) if self._own_mean else share.global_count)
        if self._skip_bad_steps:
            self._keep()
        *passes, (inputs, labels) = batch
        for one in passes:
            if len(one[1]):
                graphs.accumulate(*one, weight)
        if len(labels):
            graphs.step(inputs, labels, weight, learning_rate)
        else:
            self._finish(learning_rate)
        self.hooks.after_step(share)

    def _graphs_for(self, dtype: tf.DType) -> _Graphs:
        if dtype not in self._graphs:
            scalar = tf.TensorSpec(())
            batch = [tf.TensorSpec((None, *self._shape), dtype), tf.TensorSpec((None,), tf.int64)]

            def graph(function: Callable[..., Any], *more: tf.TensorSpec) -> Callable[..., Any]:
                # XLA has no Horovod operations.
                compiled: Callable[..., Any] = tf.function(function, input_signature=[*batch, *more], jit_compile=False)
                return compiled

            self._graphs[dtype] = _Graphs(
                step=graph(self._whole_step, scalar, scalar),
                accumulate=graph(self._accumulate, scalar),
                answer=graph(self._answer),
            )
        return self._graphs[dtype]

    # Graphs: traced once, so that Python values in them are constants.

    def _whole_step(self, inputs: tf.Tensor, labels: tf.Tensor, weight: tf.Tensor, rate: tf.Tensor) -> None:
        self._apply(self._backward(inputs, labels, weight), rate)

    def _finish_step(self, rate: tf.Tensor) -> None:
        """The step of a rank whose last pass has no sample: it takes part in the reduction all the same."""
        self._apply([tf.zeros_like(variable.value) for variable in self.model.trainable_variables], rate)

    def _accumulate(self, inputs: tf.Tensor, labels: tf.Tensor, weight: tf.Tensor) -> None:
        for total, gradient in zip(self._sums, self._backward(inputs, labels, weight), strict=True):
            total.assign_add(gradient)

    def _backward(self, inputs: tf.Tensor, labels: tf.Tensor, weight: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            images = self._normalize(inputs)
            logits = tf.cast(self.model(images, training=True), tf.float32)
            loss = self.hooks.loss(tf.reduce_sum(self._losses(logits, labels)), images, logits)
            share = tf.cast(tf.size(labels), tf.float32) * weight
            total = loss * weight + sum(self.model.losses) * share  # what regularizers add counts once over all ranks
            total = self.optimizer.scale_loss(total)
        self._loss.assign_add(tf.cast(loss, tf.float64))
        self._count.assign_add(tf.size(labels, tf.int64))
        variables = [variable.value for variable in self.model.trainable_variables]
        # Zeros for what the loss does not reach: the reduction must be of the same gradients on every rank.
        return list(tape.gradient(total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO))

    def _losses(self, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        if not self._smoothing:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        wanted = tf.one_hot(labels, logits.shape[-1])
        return keras.losses.categorical_crossentropy(wanted, logits, True, self._smoothing)

    def _apply(self, gradients: list[Any], rate: tf.Tensor) -> None:
        if self._sums:
            gradients = [one + total for one, total in zip(gradients, self._sums, strict=True)]
        gradients = self.reducer(gradients)
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        if not self._skip_bad_steps:
            self._update(gradients, rate)
            return
        # The reduced gradients are the same everywhere, so all ranks skip the same steps.
        finite = tf.math.is_finite(tf.linalg.global_norm(gradients))
        tf.cond(finite, lambda: self._update(gradients, rate), self._put_back)

    def _update(self, gradients: list[Any], rate: tf.Tensor) -> None:
        self.optimizer.learning_rate.assign(rate)
        self.optimizer.apply(gradients, self.model.trainable_variables)

    def _keep(self) -> None:
        for kept, one in zip(self._kept, self._watched(), strict=True):
            kept.assign(one)

    def _put_back(self) -> None:
        for kept, one in zip(self._kept, self._watched(), strict=True):
            one.assign(kept)

    def _watched(self) -> list[Any]:
        """What a step changes beside the weights: as it was before, if the step is skipped."""
        return [*self._local.values(), self._loss, self._count]

    def _answer(self, inputs: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = tf.cast(self.model(self._normalize(inputs), training=False), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        right = tf.equal(tf.argmax(logits, axis=1), labels)
        return tf.reduce_sum(tf.cast(losses, tf.float64)), tf.reduce_sum(tf.cast(right, tf.float64))

    # Outside of the graphs

    def train_sums(self) -> Sums:
        """Read the running loss; this is the place that waits for the device."""
        sums = Sums(loss=float(self._loss.numpy()), count=int(self._count.numpy()))
        self._set_sums([])
        return sums

    def evaluate(self, dataset: Dataset, batches: Iterable[Indices]) -> Sums:
        """Loss without label smoothing, and correct answers, over this rank's batches."""
        loss, correct, count = tf.zeros((), tf.float64), tf.zeros((), tf.float64), 0
        with self._averaged_statistics():
            for inputs, labels in read_batches(dataset, batches, self._workers):
                if not len(labels):
                    continue
                losses, right = self._graphs_for(inputs.dtype).answer(inputs, labels)
                loss += losses
                correct += right
                count += len(labels)
        return Sums(float(loss.numpy()), float(correct.numpy()), count)

    def statistics(self) -> Arrays:
        """Batch-norm statistics, the means over all ranks."""
        own = statistics(self.model)
        means = averaged([variable.value for variable in own.values()], "statistics")
        return {name: mean.numpy() for name, mean in zip(own, means, strict=True)}

    def shared_state(self, statistics: Arrays) -> Callable[[Path], None]:
        """Copy weights and optimizer to the host; the weights get the ranks' mean statistics."""
        weights = copies(named(self.model)) | statistics
        optimizer = copies(optimizer_variables(self.optimizer))
        finite = all(np.isfinite(array).all() for array in weights.values() if array.dtype.kind == "f")
        check_finite(finite, self._compression)

        def save(folder: Path) -> None:
            write(weights, folder / FILE)
            write(optimizer, folder / OPTIMIZER)

        return save

    def load_shared_state(self, folder: Path) -> None:
        """Load on every rank."""
        weights, optimizer = read(folder / FILE), read(folder / OPTIMIZER)
        own, steps = named(self.model), optimizer_variables(self.optimizer)
        check_shapes(shapes(own), shapes(weights))
        check_shapes(shapes(steps), shapes(optimizer))
        assign(own, weights)
        assign(steps, optimizer)

    def rank_state(self) -> Bytes:
        """Random generators and running statistics of this rank, as arrays and plain types."""
        sums = (float(self._loss.numpy()), int(self._count.numpy()))
        arrays = copies(self._local) | {GENERATOR: tf.random.get_global_generator().state.numpy()}
        content = pack(arrays, {PLAIN: json.dumps({**host_state(), "sums": sums})})
        return np.frombuffer(content, np.uint8)

    def load_rank_state(self, file: Path) -> None:
        """Take what rank_state() gave."""
        state, arrays = _read_plain(file), read(file)
        load_host_state(state)
        tf.random.get_global_generator().state.assign(arrays.pop(GENERATOR))
        check_shapes(shapes(self._local), shapes(arrays))
        assign(self._local, arrays)
        self._set_sums([state["sums"]])

    def load_sums(self, files: list[Path]) -> None:
        """Of the files only the plain values are read."""
        self._set_sums([_read_plain(file)["sums"] for file in files])

    def _set_sums(self, sums: list[tuple[float, int]]) -> None:
        self._loss.assign(sum(loss for loss, _ in sums))
        self._count.assign(sum(count for _, count in sums))

    def load_weights(self, folder: Path) -> dict[str, str]:
        """Take each array whose name and shape fit; the others keep their initial values."""
        own, saved = named(self.model), read(folder / FILE)
        report = report_shapes(shapes(own), shapes(saved))
        assign({name: own[name] for name, what in report.items() if what == "loaded"}, saved)
        return report

    def fingerprint(self) -> str:
        """SHA-256 over the trainable variables' bytes, in the model's order."""
        return hash_arrays(variable.numpy() for variable in self.model.trainable_variables)

    @contextmanager
    def _averaged_statistics(self) -> Iterator[None]:
        """Evaluate with the batch-norm statistics of all ranks, then train on with this rank's own."""
        own = copies(self._local)
        variables = list(self._local.values())
        for variable, mean in zip(variables, averaged([v.value for v in variables], "statistics"), strict=True):
            variable.assign(mean)
        try:
            yield
        finally:
            assign(self._local, own)


@dataclass(frozen=True)
class _Graphs:
    """The compiled functions for inputs of one type."""

    step: Callable[..., Any]
    accumulate: Callable[..., Any]
    answer: Callable[..., Any]


def _claim_device(wanted: str, communicator: Communicator) -> tuple[str | None, str]:
    """Make one GPU, or none, visible to this rank and limit its threads; the GPU's name on this host, and a fault."""
    gpus = tf.config.list_physical_devices("GPU")
    if wanted == "cuda" and not gpus:
        return None, "device=cuda but TensorFlow sees no GPU: check nvidia-smi and the CUDA build, or use device=cpu"
    # A launcher may show each rank one GPU of its own; then all are number 0.
    number = communicator.local_rank % max(1, len(gpus))
    mine = gpus[number : number + 1] if wanted != "cpu" else []
    # Once TensorFlow has run anything this is fixed, as in the second run of a sweep, which finds it done.
    with suppress(RuntimeError):
        if "TF_NUM_INTRAOP_THREADS" not in os.environ:
            tf.config.threading.set_intra_op_parallelism_threads(_threads(communicator.local_size))
        tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine:
            tf.config.experimental.set_memory_growth(gpu, True)
    return (gpu_name(number) if mine else None), ""


def _threads(local_size: int) -> int:
    """The cores of one rank: a launcher that binds has divided them already."""
    cores = len(os.sched_getaffinity(0))
    bound = cores * local_size <= (os.cpu_count() or 1)
    return cores if bound else max(1, cores // local_size)


def _raise(sentence: str) -> None:
    if sentence:
        raise UserError(sentence)


def _seed(seed: int) -> None:
    seed_host(seed)
    keras.utils.set_random_seed(seed % 2**32)
    tf.random.set_global_generator(tf.random.Generator.from_seed(seed))


def _make_model(config: Any, communicator: Communicator) -> keras.Model:
    """The model, from the same seed on every rank; afterwards each rank draws its own numbers."""
    keras.utils.clear_session(free_memory=False)  # automatic names begin anew: they are the names in checkpoints
    keras.config.set_dtype_policy(POLICIES[config.precision])
    _seed(config.seed)
    model: keras.Model = instantiate(config.model)
    model.build((None, *config.data.shape))
    if config.sync_batch_norm and communicator.size > 1:
        model = synchronize(model)
    _seed(config.seed + 1 + communicator.rank)
    for name, variable in local_variables(model).items():
        if is_generator(variable):
            seeds = np.random.default_rng((config.seed, communicator.rank, len(name)))
            variable.assign(seeds.integers(0, 2**31, variable.shape).astype(variable.dtype))
    return model


def _make_optimizer(config: Any) -> keras.optimizers.Optimizer:
    options = OmegaConf.to_container(config.optimizer, resolve=True)
    assert isinstance(options, dict)
    options["learning_rate"] = options.pop("lr")
    if config.clip_norm is not None:
        options["global_clipnorm"] = float(config.clip_norm)
    optimizer: keras.optimizers.Optimizer = instantiate(options)
    if type(optimizer) is keras.optimizers.SGD:
        optimizer.__class__ = SteadySGD
    return keras.optimizers.LossScaleOptimizer(optimizer) if config.precision == "fp16" else optimizer


def _read_plain(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "numpy") as opened:
            state: dict[str, Any] = json.loads(opened.metadata()[PLAIN])
        return {**state, "sums": tuple(state["sums"])}
    except FileNotFoundError as error:
        raise UserError(NO_RANK.format(file)) from error
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be read ({error}): resume from another checkpoint") from error
