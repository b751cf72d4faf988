#include "tensors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { kMostDims = 8 };

typedef struct {
  const char* name;
  TF_DataType type;
} Type;

static const Type kTypes[] = {{"int32", TF_INT32},
                              {"int64", TF_INT64},
                              {"uint64", TF_UINT64},
                              {"float32", TF_FLOAT},
                              {"float64", TF_DOUBLE}};

_Noreturn void Fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fflush(stdout);
  fprintf(stderr, "score: ");
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  exit(1);
}

void* Allocate(size_t bytes) {
  void* const memory = malloc(bytes == 0 ? 1 : bytes);
  if (memory == NULL) Fail("no memory for %zu bytes", bytes);
  return memory;
}

char* CopyText(const char* text, size_t length) {
  char* const copy = Allocate(length + 1);
  memcpy(copy, text, length);
  copy[length] = '\0';
  return copy;
}

static char* ReadText(const char* path) {
  FILE* const file = fopen(path, "rb");
  if (file == NULL) Fail("%s: %s", path, strerror(errno));
  size_t size = 0, room = 1 << 16;
  char* text = Allocate(room);
  for (size_t got; (got = fread(text + size, 1, room - size - 1, file)) > 0;) {
    size += got;
    if (size + 1 < room) continue;
    room *= 2;
    text = realloc(text, room);
    if (text == NULL) Fail("no memory for %zu bytes", room);
  }
  if (ferror(file)) Fail("%s: %s", path, strerror(errno));
  fclose(file);
  if (memchr(text, '\0', size) != NULL) Fail("%s is not text", path);
  text[size] = '\0';
  return text;
}

// The words of a text, one after another.
typedef struct {
  const char* path;
  const char* next;
  int line;  // of `next`
} Words;

// Returns a copy of the next word, or NULL at the end of the text, or of the line if `in_line`.
static char* NextWord(Words* words, bool in_line) {
  for (;; ++words->next) {
    if (*words->next == '#') words->next += strcspn(words->next, "\n");
    if (*words->next == '\0' || (*words->next == '\n' && in_line)) return NULL;
    if (strchr(" \t\r\n", *words->next) == NULL) break;
    if (*words->next == '\n') ++words->line;
  }
  const size_t length = strcspn(words->next, " \t\r\n#");
  char* const word = CopyText(words->next, length);
  words->next += length;
  return word;
}

static bool ParseValue(const char* word, TF_DataType type, void* value) {
  char* end;
  errno = 0;
  if (type == TF_FLOAT) {
    const float number = strtof(word, &end);
    if (errno == ERANGE && number < 1 && number > -1) errno = 0;  // close to 0
    *(float*)value = number;
  } else if (type == TF_DOUBLE) {
    const double number = strtod(word, &end);
    if (errno == ERANGE && number < 1 && number > -1) errno = 0;
    *(double*)value = number;
  } else if (type == TF_UINT64) {
    if (word[0] == '-') return false;
    *(uint64_t*)value = strtoull(word, &end, 10);
  } else {
    const long long number = strtoll(word, &end, 10);
    if (type == TF_INT64) {
      *(int64_t*)value = number;
    } else {
      if (number < INT32_MIN || number > INT32_MAX) return false;
      *(int32_t*)value = (int32_t)number;
    }
  }
  return errno == 0 && end != word && *end == '\0';
}

// Reads the type and the shape of a tensor, the rest of a line, and allocates it.
static TF_Tensor* ReadHeader(Words* words, const char* name) {
  char* word = NextWord(words, true);
  const Type* type = NULL;
  for (size_t i = 0; word != NULL && i < sizeof(kTypes) / sizeof(kTypes[0]); ++i) {
    if (strcmp(word, kTypes[i].name) == 0) type = &kTypes[i];
  }
  if (type == NULL) {
    Fail("%s:%d: '%s' has the type '%s', expected int32, int64, uint64, float32 or float64",
         words->path, words->line, name, word == NULL ? "" : word);
  }
  free(word);
  int64_t dims[kMostDims], elements = 1;
  int num_dims = 0;
  while ((word = NextWord(words, true)) != NULL) {
    if (num_dims == kMostDims) Fail("%s:%d: too many dimensions", words->path, words->line);
    int64_t* const dim = &dims[num_dims++];
    if (!ParseValue(word, TF_INT64, dim) || *dim < 0 || *dim > INT32_MAX ||
        (elements *= *dim) > INT32_MAX) {
      Fail("%s:%d: '%s' is not a dimension of a batch", words->path, words->line, word);
    }
    free(word);
  }
  const size_t bytes = (size_t)elements * TF_DataTypeSize(type->type);
  TF_Tensor* const tensor = TF_AllocateTensor(type->type, dims, num_dims, bytes);
  if (tensor == NULL) Fail("%s:%d: no memory for %zu bytes", words->path, words->line, bytes);
  return tensor;
}

size_t ReadTensors(const char* path, NamedTensor** tensors) {
  char* const text = ReadText(path);
  Words words = {path, text, 1};
  size_t count = 0;
  *tensors = NULL;
  for (char* name; (name = NextWord(&words, false)) != NULL;) {
    TF_Tensor* const tensor = ReadHeader(&words, name);
    const TF_DataType type = TF_TensorType(tensor);
    char* const data = TF_TensorData(tensor);
    const int64_t elements = TF_TensorElementCount(tensor);
    for (int64_t i = 0; i < elements; ++i) {
      char* const word = NextWord(&words, false);
      if (word == NULL) {
        Fail("%s:%d: '%s' has %" PRId64 " values, expected %" PRId64, path, words.line, name, i,
             elements);
      }
      if (!ParseValue(word, type, data + (size_t)i * TF_DataTypeSize(type))) {
        Fail("%s:%d: '%s' is not a value of '%s'", path, words.line, word, name);
      }
      free(word);
    }
    *tensors = realloc(*tensors, (count + 1) * sizeof(**tensors));
    if (*tensors == NULL) Fail("no memory for %zu tensors", count + 1);
    (*tensors)[count++] = (NamedTensor){name, tensor};
  }
  free(text);
  return count;
}

static void PrintValue(FILE* file, TF_DataType type, const void* value) {
  switch (type) {
    case TF_INT32:
      fprintf(file, "%" PRId32, *(const int32_t*)value);
      break;
    case TF_INT64:
      fprintf(file, "%" PRId64, *(const int64_t*)value);
      break;
    case TF_UINT64:
      fprintf(file, "%" PRIu64, *(const uint64_t*)value);
      break;
    case TF_FLOAT:
      fprintf(file, "%.9g", *(const float*)value);
      break;
    default:
      fprintf(file, "%.17g", *(const double*)value);
  }
}

void PrintTensor(FILE* file, const char* name, const TF_Tensor* tensor) {
  const Type* type = NULL;
  for (size_t i = 0; i < sizeof(kTypes) / sizeof(kTypes[0]); ++i) {
    if (kTypes[i].type == TF_TensorType(tensor)) type = &kTypes[i];
  }
  if (type == NULL) {
    Fail("'%s' has TensorFlow's type %d, which this program does not print", name,
         (int)TF_TensorType(tensor));
  }
  fprintf(file, "%s %s", name, type->name);
  const int num_dims = TF_NumDims(tensor);
  for (int i = 0; i < num_dims; ++i) fprintf(file, " %" PRId64, TF_Dim(tensor, i));
  fprintf(file, "\n");
  const char* const data = TF_TensorData(tensor);
  const int64_t elements = TF_TensorElementCount(tensor);
  const int64_t row = num_dims == 0 ? 1 : TF_Dim(tensor, num_dims - 1);
  for (int64_t i = 0; i < elements; ++i) {
    PrintValue(file, type->type, data + (size_t)i * TF_DataTypeSize(type->type));
    fputc((i + 1) % row == 0 ? '\n' : ' ', file);
  }
}
