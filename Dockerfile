# dynafed on the CPU:
#   docker build -t dynafed .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" dynafed compare demo --methods fedavg,dynafed
# Runs are left in ./runs. Datasets: -v /path/to/data:/data:ro. On Linux, torch comes with CUDA unless
# --build-arg PIP_EXTRA_INDEX_URL=... names PyTorch's index of CPU builds.
FROM python:3.12-slim

# The C++ compiler makes the fast kernels, when the package is installed.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
COPY setup.py pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt .

ENV DYNAFED_DATA=/data DYNAFED_CACHE=/tmp/dynafed
RUN mkdir /data
WORKDIR /work
ENTRYPOINT ["dynafed"]
CMD ["--help"]
