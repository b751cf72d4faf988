// The signatures of a SavedModel: which tensors of the graph are their inputs and outputs.
//
// TF_LoadSessionFromSavedModel returns them in a MetaGraphDef, a serialized protocol buffer. This
// reads the few fields that a client needs, without the protobuf library:
//
//     MetaGraphDef.signature_def = 5   map from the name to SignatureDef
//     SignatureDef.inputs = 1          map from the name to TensorInfo
//     SignatureDef.outputs = 2         map from the name to TensorInfo
//     TensorInfo.name = 1              OPERATION:INDEX
#ifndef SERVING_C_SIGNATURE_H_
#define SERVING_C_SIGNATURE_H_

#include <stddef.h>
#include <tensorflow/c/c_api.h>

typedef struct {
  char* name;       // in the signature
  char* operation;  // in the graph
  int index;        // of the operation's output
} Endpoint;

typedef struct {
  size_t num_inputs, num_outputs;
  Endpoint *inputs, *outputs;
} Signature;

// Finds a signature by its name. Fails, with the names that there are, if it is missing.
Signature FindSignature(const TF_Buffer* meta_graph, const char* name);

#endif  // SERVING_C_SIGNATURE_H_
