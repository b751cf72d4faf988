// Tensors in files: the batch that `score` reads, and the answers that it prints.
//
// The format is text. For each tensor: a line with its name, its type (int32, int64, uint64,
// float32 or float64) and its shape; then its values in row-major order, separated by white space.
// A '#' begins a comment, up to the end of the line.
//
//     ids int64 2 3
//     1 2 3
//     -1 50 1099511627776
//
// Floats are printed with enough digits to have the same bits when they are read again.
#ifndef SERVING_C_TENSORS_H_
#define SERVING_C_TENSORS_H_

#include <stdio.h>
#include <tensorflow/c/c_api.h>

typedef struct {
  char* name;
  TF_Tensor* tensor;
} NamedTensor;

// Prints "score: " and a message to stderr, and ends the program with exit code 1.
_Noreturn void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// As malloc and strndup. If memory runs out, the program fails.
void* Allocate(size_t bytes);
char* CopyText(const char* text, size_t length);

// Reads a file of tensors; returns their number. An error names the file and the line.
size_t ReadTensors(const char* path, NamedTensor** tensors);

// Prints a tensor. Fails for other types than those of the format.
void PrintTensor(FILE* file, const char* name, const TF_Tensor* tensor);

#endif  // SERVING_C_TENSORS_H_
