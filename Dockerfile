# Heron from its wheel, with the versions of requirements.lock.
#
#   docker build --target cpu --tag heron:cpu .
#   docker build --target gpu --tag heron:gpu .
#   docker run --rm --volume "$PWD:/work" heron:cpu pretrain faces
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD:/work" heron:gpu pretrain faces
FROM python:3.13-slim AS wheel
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-deps --wheel-dir /dist .

FROM python:3.13-slim AS base
# gcc and g++ are for DeepSpeed and Triton, which compile when they first run.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
  && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1
COPY requirements.lock .
COPY --from=wheel /dist /dist
WORKDIR /work
ENTRYPOINT ["heron"]
CMD ["--help"]

FROM base AS cpu
RUN python -m pip install --extra-index-url https://download.pytorch.org/whl/cpu \
    --requirement /requirements.lock torch==2.13.0+cpu \
  && python -m pip install --no-deps /dist/*.whl

FROM base AS gpu
# PyPI's torch brings CUDA; faiss-gpu owns the module that faiss-cpu has in the lock.
RUN sed 's/^faiss-cpu==/faiss-gpu==/' /requirements.lock > /gpu.lock \
  && python -m pip install --requirement /gpu.lock \
  && python -m pip install --no-deps /dist/*.whl
