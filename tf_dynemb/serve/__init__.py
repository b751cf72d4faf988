"""A server of exported models: `python -m tf_dynemb.serve`, on KServe's Python runtime.

    python -m tf_dynemb.serve --model ctr=PATH

It answers KServe's protocols V1 (TensorFlow Serving's REST) and V2 (Open Inference Protocol, REST
and gRPC), over KServe's data plane, messages and model interface. docs/server.md is the guide.

    rest, rpc          the protocols, their limits and errors
      └─> dataplane    the models of the server by name; which requests are let in
            └─> model      versions, snapshots that it follows; requests become answers
                  ├─> v1, v2     the bodies of requests and answers
                  ├─> sources    where versions appear
                  └─> batches    requests that wait together, and the threads that answer them
                        └─> loaded_model   a SavedModel, called with arrays
                              └─> inputs   values of inputs: read, checked, joined
                                    └─> nested   nested lists, and the JSON that has them

All of it runs on the thread of one event loop, except calls of models, and what loads them.

May import: `_ops`, `_presence`, `_version`, `chains`, `parallel`, `saved_models`, `storage`,
`variables`.
"""
