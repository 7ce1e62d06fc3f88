"""Runs llama.cpp's own server, of the package xllamacpp, until its input ends. `bench.serving.peers` starts it.

``python llama_server.py JOB``, where JOB is a JSON object: model, slots, tokens (of each slot), threads, port.
"""

import json
import sys

import xllamacpp

job = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = job["model"]
params.n_parallel, params.n_ctx = job["slots"], job["slots"] * job["tokens"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
params.port, params.verbosity = job["port"], 0
server = xllamacpp.Server(params)
sys.stdin.read()
