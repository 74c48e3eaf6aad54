# The image that `launch k8s` names: the framework with everything that trains, for a user without rights.
#
#   docker build --tag registry.example/team/train:1.0 .
#
# The base is enough for torch's optimizers, which are the default, and for DeepSpeed's operators on CPU. DeepSpeed's own CUDA
# operators (`optimizer.implementation: deepspeed`) are compiled by nvcc at first use: for them take a base with CUDA's compiler
# and Ubuntu or Debian, --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04. By digest (NAME@sha256:...) the same image
# is built tomorrow.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# g++: operators that are compiled at first use; libaio: offload to NVMe. A base without Python gets the distribution's.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libaio-dev \
    && { command -v python3 >/dev/null || apt-get install --yes --no-install-recommends python3 python3-dev python3-venv; } \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /workspace
# What changes seldom comes first: five gigabytes of packages, in the versions that the tests ran with.
COPY pyproject.toml constraints.txt ./
COPY framework/hosts/environment.py framework/hosts/
# No pipe: its end would be that of its last command, and an image without torch would be built.
RUN python framework/hosts/environment.py requirements train text > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt \
    && rm requirements.txt

COPY README.md LICENSE train.py ./
COPY deepspeed_lint deepspeed_lint
COPY framework framework
COPY ds_configs ds_configs
RUN pip install --no-deps --no-build-isolation --editable .

# A number, so that Kubernetes can tell that it is not root. What is written goes to volumes. Ubuntu's images, and so CUDA's, have
# a user of this number already.
RUN getent passwd 1000 >/dev/null || useradd --uid 1000 --create-home dsf
USER 1000:1000
# No shell and no init: `python -m framework launch node` is process 1, gets SIGTERM itself and reaps what it started.
CMD ["python", "-m", "framework", "--help"]
