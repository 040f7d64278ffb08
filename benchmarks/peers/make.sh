#!/bin/sh
# Environments for the peers of ../cases.py, in build/peers; what fails is left out there.
# neural-tangents needs an older jax than torch's numpy allows; its converter from TensorFlow is not
# used, and left out. BlazeFL needs a newer Python, which uv finds or fetches.
cd "$(dirname "$0")/../.."
uv=.venv/bin/uv
torch=$(.venv/bin/python -c 'import torch; print("torch==" + torch.__version__.split("+")[0])')
environment() {
    folder=build/peers/$1 python=$2
    shift 2
    $uv venv --quiet --clear --python "$python" "$folder" &&
    $uv pip install --quiet --python "$folder/bin/python" pyperf "$@"
}
environment neural-tangents .venv/bin/python -r benchmarks/peers/neural_tangents.txt &&
    $uv pip install --quiet --python build/peers/neural-tangents/bin/python --no-deps neural-tangents==0.6.5
environment blazefl "${NEWEST:-3.13}" 'blazefl[contrib,reproducibility]' "$torch" numpy
environment pfllib .venv/bin/python h5py matplotlib scikit-learn torchvision "$torch" numpy
