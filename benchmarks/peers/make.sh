#!/bin/sh
# An environment for neural-tangents in build/peers: it needs an older jax than torch's numpy allows.
# Its converter from TensorFlow is not used, and left out.
set -e
cd "$(dirname "$0")/../.."
python3 -m venv build/peers
build/peers/bin/python -m pip install --quiet -r benchmarks/peers/neural_tangents.txt
build/peers/bin/python -m pip install --quiet --no-deps neural-tangents==0.6.5
