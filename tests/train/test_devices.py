"""Two devices that share each batch, which XLA makes of one CPU in a process of its own."""

import json
import os
import subprocess
import sys

import numpy as np

CHILD = """
import json, sys
import jax
import numpy as np
from jax.sharding import Mesh
from kvjax.models import init
from kvjax.train import UptrainConfig, train
from kvjax.train.step import train_step

config, stream, out = map(json.loads, sys.argv[1:])
settings = UptrainConfig(steps=5, seq_len=16, batch=8, accumulate=2, warmup_steps=0)
model, stream = init(config, 0), np.array(stream)

def run(devices, directory=None):
    losses = []
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    trained = train(model, stream, settings, teacher=model, mesh=mesh, checkpoint_dir=directory,
                    save_every=3, on_step=lambda m: losses.append(m["loss"]))
    return losses, trained

one, _ = run(1)
two, trained = run(2, out)
leaf = jax.tree.leaves(trained)[0]
lowered = train_step.lower
print(json.dumps({
    "one": one,
    "two": two,
    "programs": train_step._cache_size(),
    "copies": [s.data.shape == leaf.shape for s in leaf.addressable_shards],
}))
try:
    train(model, stream, UptrainConfig(steps=1, seq_len=16, batch=3),
          mesh=Mesh(np.array(jax.devices()), ("data",)))
except ValueError as error:
    assert "3 sequences do not divide among 2 devices" in str(error)
else:
    raise AssertionError("not refused")
"""


def test_two_devices_have_the_losses_of_one(tiny_config, stream, tmp_path):
    arguments = (tiny_config, stream.tolist(), str(tmp_path))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *map(json.dumps, arguments)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
    )
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout)
    np.testing.assert_allclose(result["two"], result["one"], rtol=1e-5)
    assert result["copies"] == [True, True]
    assert result["programs"] == 2  # one for each mesh: the state's sharding does not drift
