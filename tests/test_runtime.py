"""gradlab.setup, in fresh processes, because it configures a process only once."""

import gc
import os
import subprocess
import sys

import forked
import pytest

import gradlab
from gradlab import runtime


def python(program: str, **environment) -> subprocess.CompletedProcess:
    """Run a program in a fresh interpreter, outside of the checkout."""
    variables = {
        name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"
    } | environment
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=variables,
        cwd="/",
        check=False,
    )


def test_setup_prints_the_configuration_and_starts_quietly():
    done = python(
        "import gradlab\n"
        "chosen = gradlab.setup(towers=3, threads=2, seed=1)\n"
        "assert gradlab.setup(towers=3, threads=2, seed=1) is chosen\n"
        "import tensorflow as tf\n"
        "assert len(tf.config.list_logical_devices()) == 3\n"
        "assert tf.config.threading.get_intra_op_parallelism_threads() == 1\n"
        "assert tf.config.threading.get_inter_op_parallelism_threads() == 2\n"
        "print(chosen.devices)\n",
        CUDA_VISIBLE_DEVICES="-1",
    )
    sentence = "gradlab: 3 towers (CPU:0, CPU:1, CPU:2), operations at once: 2, seed 1"
    assert done.stdout.splitlines() == [
        sentence,
        sentence,  # a notebook cell that is run again shows the same output
        "('/device:CPU:0', '/device:CPU:1', '/device:CPU:2')",
    ]
    assert done.stderr == ""


def test_onednn_keeps_its_primitives_unless_configured_otherwise():
    """TensorFlow reads this variable at its first convolution. The benchmark's guard watches the
    effect on speed."""
    name = "TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE"
    program = f"import os, gradlab; gradlab.setup(); print(os.environ['{name}'])"
    # The tests' own setup has set it
    others = {key: value for key, value in os.environ.items() if key != name}
    for given, expected in (({}, "false"), ({name: "true"}, "true")):
        assert (
            forked.run("-c", program, env={**others, **given}).stdout.splitlines()[-1] == expected
        )


def test_names_that_are_imported_before_setup_start_quietly_too():
    done = python(
        "from gradlab import GradientAccumulator, average_gradients, setup; setup()",
        CUDA_VISIBLE_DEVICES="-1",
    )
    assert done.stdout.startswith("gradlab: 1 tower (CPU:0), operations at once: ")
    assert done.stdout.endswith(", no seed\n")
    assert done.stderr == ""


def test_other_messages_still_reach_stderr(capfd):
    with runtime.without_startup_noise():
        os.write(2, b"I0000 00:00:17 1 port.cc:1] a remark\nan important line\n")
    assert capfd.readouterr().err == "an important line\n"
    with pytest.raises(KeyError), runtime.without_startup_noise():
        os.write(2, b"E0000 00:00:17 1 port.cc:1] an error\n")
        raise KeyError
    assert "an error" in capfd.readouterr().err


def test_garbage_collection_is_paused_while_tensorflow_is_imported_and_goes_on_after_an_error():
    for _ in range(2):
        with pytest.raises(ImportError), runtime.without_startup_noise():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()


def test_setup_after_the_start_of_tensorflow_raises_an_error_that_says_what_to_do():
    done = forked.run(
        "-c", "import tensorflow as tf; tf.zeros(1); import gradlab; gradlab.setup(towers=2)"
    )
    assert done.returncode == 1
    assert (
        "RuntimeError: gradlab.setup must run before TensorFlow starts its devices" in done.stderr
    )
    assert "restart the kernel and call it first" in done.stderr


def test_a_second_setup_with_other_values_is_refused():
    with pytest.raises(
        RuntimeError,
        match=r"only once, and already ran with \(towers=3, .*\): restart the kernel "
        r".*\(towers=2, ",
    ):
        gradlab.setup(towers=2, seed=0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(towers=0), "towers must be a positive integer. Received: 0"),
        (dict(towers=True), "towers must be a positive integer. Received: True"),
        (
            dict(threads="many"),
            'threads must be "auto", "tensorflow" or a positive integer. Received: \'many\'',
        ),
        (
            dict(threads=0),
            'threads must be "auto", "tensorflow" or a positive integer. Received: 0',
        ),
        (dict(seed=-1), "seed must be an integer of 0 or more. Received: -1"),
        (dict(seed="x"), "seed must be an integer of 0 or more. Received: 'x'"),
    ],
)
def test_invalid_arguments_raise_an_error_with_the_rule_and_the_value(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradlab.setup(**arguments)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_in_another_process():
    """The two processes share neither addresses nor hashes, so no order that depends on them is the
    same by chance."""
    program = (
        "import hashlib, gradlab\n"
        "gradlab.setup(towers=2, seed=3)\n"
        "from gradlab.lab.experiments.training import train\n"
        "for method, towers in (('microbatched', 1), ('towers', 2)):\n"
        "    way = gradlab.Experiment(model='lenet', method=method, towers=towers, updates=5, "
        "eval_every=5)\n"
        "    losses = b''.join(u.losses.tobytes() for u in train(way, seed=1))\n"
        "    print(method, hashlib.sha256(losses).hexdigest())\n"
    )
    first, second = python(program), forked.run("-c", program, cwd="/")
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 3
    assert first.stdout == second.stdout, second.stderr


def test_the_parts_of_a_divided_gpu_are_gpus():
    done = python(
        "import tensorflow as tf\n"
        "devices = tf.config.list_physical_devices\n"
        "def refuse(*_):  # as TensorFlow does for a divided GPU\n"
        "    raise ValueError('Cannot set memory growth on device when virtual devices configured')\n"
        "tf.config.list_physical_devices = lambda kind=None: ['card'] if kind == 'GPU' else devices(kind)\n"
        "tf.config.get_logical_device_configuration = lambda device: ['one part', 'another']\n"
        "tf.config.list_logical_devices = lambda kind: ['one part', 'another'] if kind == 'GPU' else []\n"
        "tf.config.experimental.set_memory_growth = refuse\n"
        "import gradlab\n"
        "print(gradlab.setup().devices)\n"
    )
    assert "('/device:GPU:0', '/device:GPU:1')" in done.stdout, done.stderr


@pytest.mark.gpu
def test_towers_are_on_gpus_if_there_are_any():
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    if not gpus:
        pytest.skip("TensorFlow sees no GPU here")
    done = python(f"import gradlab; print(gradlab.setup(towers={gpus}).devices)")
    assert str(tuple(f"/device:GPU:{i}" for i in range(gpus))) in done.stdout
