"""The algorithms: how the ranks communicate.

The core:

- all_reduce.py: `GradientAllReduce`, the default, averages gradients, optionally in 16 bits or node by node.
- comm_hook.py: calls the comm hook that a user has registered, with DistributedDataParallel's interface.
- collective_chain.py: base of algorithms that send a bucket by several collectives, and of those on each node first.
- flat_parameters.py: copies of all parameters in flat buffers, and their mean over the ranks.

An extension, which imports the names of `ddp_compile.algorithms` alone and is imported at its first use:

- byte_grad.py: `ByteGrad` averages gradients, sent in eight bits a value.
- q_adam.py: `QAdam.algorithm()` averages gradients in warm-up, and then momenta in eight bits a value.
- parameter_average.py: base of those that average parameters in place of gradients.
- decentralized.py: `Decentralized` averages parameters with all ranks or one, during forward and backward.
- low_precision_decentralized.py: `LowPrecisionDecentralized` sends parameter changes in a ring, eight bits a value.
- local_sgd.py: `LocalSGD` averages parameters after each period of steps.
- diloco.py: `DiLoCo` takes an outer step on the mean difference of the parameters after many local steps.
- async_model_average.py: `AsyncModelAverage` averages parameters in a thread (averaging_thread.py, parameter_gate.py).

Each derives from `CommAlgorithm` (runtime/buckets/comm_algorithm.py). To add one, see CONTRIBUTING.md. The sharded
optimizer's is in runtime/sharded.
"""
