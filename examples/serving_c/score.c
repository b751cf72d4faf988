// Answers a batch with an exported model, through TensorFlow's C API.
//
//     score LIBRARY MODEL BATCH [delta PATH | wait SECONDS]...
//
// LIBRARY  the operators, such as tf_dynemb/_dynemb_ops_tf2.21.so of the installed package; "-" if
//          they are linked to the program
// MODEL    a SavedModel with tables
// BATCH    the inputs of its signature serving_default, in the format of tensors.h
//
// The program prints the answer in the same format. Then, for each further argument, it
//
// delta PATH    applies what is published at a path, by the model's signature apply_delta, and
//               prints the answer of the tables as they are then;
// wait SECONDS  asks again until the answer is another one, which it prints: the model follows a
//               path (`follow` of export_saved_model). It fails if that takes longer.
//
// An error is printed to stderr, and the exit code is 1.
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <tensorflow/c/c_api.h>
#include <time.h>

#include "signature.h"
#include "tensors.h"

typedef struct {
  TF_Graph* graph;
  TF_Session* session;
  TF_Buffer* meta_graph;
} Model;

// Fails if a call failed; `doing` says what the call should do.
static void Check(const TF_Status* status, const char* doing, const char* with) {
  if (TF_GetCode(status) != TF_OK) Fail("%s %s: %s", doing, with, TF_Message(status));
}

static Model LoadModel(const char* path) {
  TF_Status* const status = TF_NewStatus();
  TF_SessionOptions* const options = TF_NewSessionOptions();
  const char* const tags[] = {"serve"};
  Model model = {TF_NewGraph(), NULL, TF_NewBuffer()};
  model.session = TF_LoadSessionFromSavedModel(options, NULL, path, tags, 1, model.graph,
                                               model.meta_graph, status);
  Check(status, "loading", path);
  TF_DeleteSessionOptions(options);
  TF_DeleteStatus(status);
  return model;
}

static TF_Output Find(const Model* model, const Endpoint* endpoint) {
  const TF_Output found = {TF_GraphOperationByName(model->graph, endpoint->operation),
                           endpoint->index};
  if (found.oper == NULL) Fail("the graph has no operation '%s'", endpoint->operation);
  return found;
}

// Runs a signature. The answers have the order of its outputs.
static TF_Tensor** Run(const Model* model, const char* name, const Signature* signature,
                       const NamedTensor* batch, size_t size) {
  TF_Output* const inputs = Allocate(signature->num_inputs * sizeof(TF_Output));
  TF_Tensor** const given = Allocate(signature->num_inputs * sizeof(TF_Tensor*));
  for (size_t i = 0; i < signature->num_inputs; ++i) {
    given[i] = NULL;
    for (size_t j = 0; j < size; ++j) {
      if (strcmp(batch[j].name, signature->inputs[i].name) == 0) given[i] = batch[j].tensor;
    }
    if (given[i] == NULL) {
      Fail("the batch has no input '%s' of signature '%s'", signature->inputs[i].name, name);
    }
    inputs[i] = Find(model, &signature->inputs[i]);
  }
  if (size != signature->num_inputs) {
    Fail("the batch has %zu tensors; signature '%s' has %zu inputs", size, name,
         signature->num_inputs);
  }
  TF_Output* const outputs = Allocate(signature->num_outputs * sizeof(TF_Output));
  TF_Tensor** const answers = Allocate(signature->num_outputs * sizeof(TF_Tensor*));
  for (size_t i = 0; i < signature->num_outputs; ++i) {
    outputs[i] = Find(model, &signature->outputs[i]);
  }
  TF_Status* const status = TF_NewStatus();
  TF_SessionRun(model->session, NULL, inputs, given, (int)signature->num_inputs, outputs, answers,
                (int)signature->num_outputs, NULL, 0, NULL, status);
  Check(status, "running signature", name);
  TF_DeleteStatus(status);
  free(outputs);
  free(given);
  free(inputs);
  return answers;
}

static void DeleteTensors(TF_Tensor** tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) TF_DeleteTensor(tensors[i]);
  free(tensors);
}

// Returns the answer to a batch as text.
static char* Answer(const Model* model, const Signature* signature, const NamedTensor* batch,
                    size_t size) {
  char* text = NULL;
  size_t length = 0;
  FILE* const file = open_memstream(&text, &length);
  if (file == NULL) Fail("no memory for the answer");
  TF_Tensor** const answers = Run(model, "serving_default", signature, batch, size);
  for (size_t i = 0; i < signature->num_outputs; ++i) {
    PrintTensor(file, signature->outputs[i].name, answers[i]);
  }
  DeleteTensors(answers, signature->num_outputs);
  fclose(file);
  return text;
}

// Applies what is published at a path, and prints what that was.
static void ApplyDelta(const Model* model, const char* path) {
  const Signature signature = FindSignature(model->meta_graph, "apply_delta");
  TF_Tensor* const tensor = TF_AllocateTensor(TF_STRING, NULL, 0, sizeof(TF_TString));
  TF_TString* const text = TF_TensorData(tensor);
  TF_StringInit(text);
  TF_StringCopy(text, path, strlen(path));
  char name[] = "path";
  const NamedTensor input = {name, tensor};
  TF_Tensor** const answers = Run(model, "apply_delta", &signature, &input, 1);
  printf("# delta %s:", path);
  for (size_t i = 0; i < signature.num_outputs; ++i) {
    if (TF_TensorType(answers[i]) != TF_INT64) continue;
    printf(" %s %" PRId64, signature.outputs[i].name, *(const int64_t*)TF_TensorData(answers[i]));
  }
  printf("\n");
  DeleteTensors(answers, signature.num_outputs);
  TF_StringDealloc(text);
  TF_DeleteTensor(tensor);
}

static double Now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char** argv) {
  if (argc < 4 || argc % 2 != 0) {
    Fail("usage: score LIBRARY MODEL BATCH [delta PATH | wait SECONDS]...");
  }
  if (strcmp(argv[1], "-") != 0) {
    TF_Status* const status = TF_NewStatus();
    TF_LoadLibrary(argv[1], status);
    Check(status, "loading", argv[1]);
    TF_DeleteStatus(status);
  }
  NamedTensor* batch;
  const size_t size = ReadTensors(argv[3], &batch);
  const Model model = LoadModel(argv[2]);
  const Signature signature = FindSignature(model.meta_graph, "serving_default");
  char* last = Answer(&model, &signature, batch, size);
  fputs(last, stdout);
  for (int i = 4; i < argc; i += 2) {
    const char *const what = argv[i], *const with = argv[i + 1];
    char* answer = NULL;
    if (strcmp(what, "delta") == 0) {
      ApplyDelta(&model, with);
      answer = Answer(&model, &signature, batch, size);
    } else if (strcmp(what, "wait") == 0) {
      fflush(stdout);  // for a program that publishes when it has read the answer
      const double end = Now() + strtod(with, NULL);
      const struct timespec pause = {0, 20000000};
      while (answer == NULL || strcmp(answer, last) == 0) {
        if (Now() > end) Fail("the answer is the same after %s seconds", with);
        if (answer != NULL) nanosleep(&pause, NULL);
        free(answer);
        answer = Answer(&model, &signature, batch, size);
      }
      printf("# wait\n");
    } else {
      Fail("'%s' is neither delta nor wait", what);
    }
    fputs(answer, stdout);
    free(last);
    last = answer;
  }
  free(last);
  TF_Status* const status = TF_NewStatus();
  TF_DeleteSession(model.session, status);
  Check(status, "closing", argv[2]);
  TF_DeleteStatus(status);
  TF_DeleteGraph(model.graph);
  TF_DeleteBuffer(model.meta_graph);
  return fclose(stdout) == 0 ? 0 : 1;
}
