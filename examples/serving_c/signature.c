#include "signature.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tensors.h"

// Bytes of a message that have not been read.
typedef struct {
  const uint8_t* next;
  const uint8_t* end;
} Bytes;

static uint64_t ReadVarint(Bytes* bytes) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && bytes->next < bytes->end; shift += 7) {
    const uint8_t byte = *bytes->next++;
    value |= (uint64_t)(byte & 0x7F) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  Fail("the MetaGraphDef is damaged");
}

static Bytes Take(Bytes* bytes, uint64_t size) {
  if (size > (uint64_t)(bytes->end - bytes->next)) Fail("the MetaGraphDef is damaged");
  const Bytes taken = {bytes->next, bytes->next + size};
  bytes->next = taken.end;
  return taken;
}

// Finds the next field of this number that has a length; returns whether there is one.
static bool NextField(Bytes* message, uint64_t number, Bytes* field) {
  enum { kVarint, kEightBytes, kLength, kFourBytes = 5 };
  while (message->next < message->end) {
    const uint64_t tag = ReadVarint(message);
    switch (tag & 7) {
      case kVarint:
        ReadVarint(message);
        break;
      case kEightBytes:
        Take(message, 8);
        break;
      case kFourBytes:
        Take(message, 4);
        break;
      case kLength:
        *field = Take(message, ReadVarint(message));
        if (tag >> 3 == number) return true;
        break;
      default:
        Fail("the MetaGraphDef is damaged");
    }
  }
  return false;
}

// A field of this number; empty if there is none.
static Bytes Field(Bytes message, uint64_t number) {
  Bytes field;
  if (NextField(&message, number, &field)) return field;
  return (Bytes){message.end, message.end};
}

static char* Text(Bytes bytes) {
  return CopyText((const char*)bytes.next, (size_t)(bytes.end - bytes.next));
}

static size_t ReadEndpoints(Bytes signature, uint64_t number, Endpoint** endpoints) {
  size_t count = 0;
  *endpoints = NULL;
  for (Bytes entry; NextField(&signature, number, &entry);) {
    *endpoints = realloc(*endpoints, (count + 1) * sizeof(**endpoints));
    if (*endpoints == NULL) Fail("no memory for %zu endpoints", count + 1);
    Endpoint* const endpoint = &(*endpoints)[count++];
    endpoint->name = Text(Field(entry, 1));
    endpoint->operation = Text(Field(Field(entry, 2), 1));
    char* const colon = strrchr(endpoint->operation, ':');
    endpoint->index = colon == NULL ? 0 : atoi(colon + 1);
    if (colon != NULL) *colon = '\0';
  }
  return count;
}

static int ByName(const void* one, const void* other) {
  return strcmp(((const Endpoint*)one)->name, ((const Endpoint*)other)->name);
}

Signature FindSignature(const TF_Buffer* meta_graph, const char* name) {
  enum { kKey = 1, kValue = 2, kInputs = 1, kOutputs = 2, kSignatures = 5 };
  const uint8_t* const data = meta_graph->data;
  Bytes message = {data, data + meta_graph->length};
  char* names = CopyText("", 0);
  for (Bytes entry; NextField(&message, kSignatures, &entry);) {
    char* const found = Text(Field(entry, kKey));
    if (strcmp(found, name) == 0) {
      Signature signature;
      const Bytes value = Field(entry, kValue);
      signature.num_inputs = ReadEndpoints(value, kInputs, &signature.inputs);
      signature.num_outputs = ReadEndpoints(value, kOutputs, &signature.outputs);
      // The order of the entries of a map differs from export to export.
      qsort(signature.inputs, signature.num_inputs, sizeof(Endpoint), ByName);
      qsort(signature.outputs, signature.num_outputs, sizeof(Endpoint), ByName);
      free(found);
      free(names);
      return signature;
    }
    char* const longer = Allocate(strlen(names) + strlen(found) + 2);
    strcat(strcat(strcpy(longer, names), " "), found);
    free(names);
    free(found);
    names = longer;
  }
  Fail("the model has no signature '%s'; it has:%s", name, names);
}
