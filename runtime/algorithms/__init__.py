"""The algorithms: how the ranks communicate.

- all_reduce.py: `GradientAllReduce`, the default, averages gradients, optionally in 16 bits or node by node.
- byte_grad.py: `ByteGrad` averages gradients, sent in eight bits a value.
- q_adam.py: `QAdam.algorithm()` averages gradients in warm-up, and then momenta in eight bits a value.
- comm_hook.py: calls the comm hook that a user has registered, with DistributedDataParallel's interface.
- decentralized.py: `Decentralized` averages parameters with all ranks or one, during forward and backward.
- low_precision_decentralized.py: `LowPrecisionDecentralized` sends parameter changes in a ring, eight bits a value.
- local_sgd.py: `LocalSGD` averages parameters after each period of steps.
- diloco.py: `DiLoCo` takes an outer step on the mean difference of the parameters after many local steps.
- async_model_average.py: `AsyncModelAverage` averages parameters in a thread, so that no rank waits for another.

Each derives from `CommAlgorithm` (runtime/buckets/comm_algorithm.py), directly or through

- collective_chain.py: several collectives for each bucket, also on each node first and between the nodes;
- parameter_average.py: parameters are averaged in place of gradients.

The other files hold parts of these. To add an algorithm, write a file here, modeled on all_reduce.py, and export its
config in ddp_compile/algorithms.py, see "Add an algorithm" in CONTRIBUTING.md. The sharded optimizer's is in
runtime/sharded.
"""
