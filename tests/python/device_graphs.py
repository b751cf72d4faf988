"""What TensorFlow's graphs do on a GPU, for tests on the fake one."""

from tensorflow.python.eager import context


def nodes_of(call):
    """Returns the nodes on a GPU of the graphs that TensorFlow runs for the first call."""
    context.context().enable_graph_collection()
    try:
        call()
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()
    parts = [part for graph in graphs for part in graph.partition_graphs]
    return [node for part in parts for node in part.node if "GPU:0" in node.device]


def copied_to_the_host(nodes):
    """Returns the names of tensors that are copied from a GPU's memory."""
    return [node.name for node in nodes if node.op == "_Send"]


def made_elsewhere(function):
    """Returns the operations that make bags, or their number, and may run on a GPU.

    The fake GPU has few kernels of TensorFlow's own, so that its graphs do not show all copies.
    """
    found = []
    for operation in function.graph.get_operations():
        definition = operation.op_def
        if operation.type not in ("DynembLookupSparse", "DynembApplyPooledGradients"):
            continue
        position = 0
        for argument in definition.input_arg:
            count = (
                len(operation.get_attr(argument.type_list_attr))
                if argument.type_list_attr
                else (operation.get_attr(argument.number_attr) if argument.number_attr else 1)
            )
            if argument.name in ("bags", "num_bags"):
                for tensor in operation.inputs[position : position + count]:
                    found += [
                        (operation.name, argument.name, maker.name)
                        for maker in makers(tensor.op)
                        if "CPU" not in maker.device
                    ]
            position += count
    return found


def makers(operation):
    """Returns an operation and those that its inputs come from.

    Not the arguments of the function, nor Shape, whose output is on the host in any case.
    """
    if operation.type in ("Placeholder", "Shape"):
        return []
    return [operation, *(maker for tensor in operation.inputs for maker in makers(tensor.op))]


def operators(nodes):
    return sorted(node.op for node in nodes if node.op.startswith("Dynemb"))
