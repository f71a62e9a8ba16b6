/* evenkeel: layer norm, RMS norm and group norm, forward and backward.
 *
 * The one seam of the library, in plain C. Every backend (CPU, CUDA, reference) sits below it and
 * every framework binding above it. A call takes three structs: the problem (what to compute), its
 * tensors, and how to execute it.
 *
 *   - Set each struct with its EK_..._INIT macro. That records the struct's size: a library of any later version, whose
 *     structs may have more fields at their ends, takes those that a caller does not know as absent. (ek_tensor and
 *     ek_vector have no size of their own: they lie inside other structs, so they never grow.)
 *   - Nothing is allocated, cast or synchronised inside: ask for the workspace size, hand the workspace in.
 *   - Every function returns a status. On failure nothing has been written, and ek_last_error() names the argument,
 *     its value and what is allowed.
 *   - All functions may be called from any thread.
 */
#ifndef EVENKEEL_EVENKEEL_H_
#define EVENKEEL_EVENKEEL_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EK_API
#else
#define EK_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EK_VERSION_MAJOR 0
#define EK_VERSION_MINOR 1
#define EK_VERSION_PATCH 0

typedef enum ek_status {
  EK_OK = 0,
  EK_INVALID_ARGUMENT = 1, /* the call is wrong; it would be wrong on every machine */
  EK_UNSUPPORTED = 2,   /* the call is right, but no backend of this build or machine can run it */
  EK_DEVICE_ERROR = 3,  /* the device refused: launch failure, lost device */
  EK_INTERNAL_ERROR = 4 /* a defect of the library; please report it */
} ek_status;

typedef enum ek_dtype {
  EK_F32 = 0,
  EK_F64 = 1,
  EK_F16 = 2,
  EK_BF16 = 3,
  /* Of y alone, which is quantized then (ek_forward_args). E4M3 has no infinity (float8_e4m3fn). */
  EK_F8_E4M3 = 4,
  EK_F8_E5M2 = 5,
  EK_I8 = 6
} ek_dtype;

typedef enum ek_op { EK_LAYER_NORM = 0, EK_RMS_NORM = 1, EK_GROUP_NORM = 2 } ek_op;

/* Group norm only. NCHW: each channel's pixels lie together. NHWC (channels last): each pixel's channels do. */
typedef enum ek_layout { EK_NCHW = 0, EK_NHWC = 1 } ek_layout;

/* Applied to the normalized, scaled and shifted value. */
typedef enum ek_activation {
  EK_ACTIVATION_NONE = 0,
  EK_ACTIVATION_SILU = 1,
  EK_ACTIVATION_RELU = 2,
  EK_ACTIVATION_GELU = 3, /* z * Phi(z), by the error function */
  EK_ACTIVATION_GELU_TANH =
      4 /* the tanh form: z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3))) / 2 */
} ek_activation;

/* Where an RMS norm of half-precision input rounds (no effect where x has the compute type).
 *   NONE, GEMMA  everything in the compute type, one rounding when y is stored
 *   LLAMA        the normalized value is first rounded to x's type, then multiplied by the weight
 * Gradients treat that rounding as the identity, and dweight uses the rounded value, as automatic
 * differentiation of the written-out formula does. */
typedef enum ek_casting {
  EK_CASTING_NONE = 0,
  EK_CASTING_LLAMA = 1,
  EK_CASTING_GEMMA = 2
} ek_casting;

typedef enum ek_device { EK_CPU = 0, EK_CUDA = 1 } ek_device;

/* What to compute.
 *
 *   layer norm   y = act((x - mean(x)) * rstd * (weight_offset + weight) + bias),  rstd = 1 / sqrt(var(x) + eps)
 *   RMS norm     y = act(x * rstd * (weight_offset + weight) + bias),              rstd = 1 / sqrt(mean(x^2) + eps)
 *   group norm   layer norm's formula over each sample's group of channels/groups neighbouring channels and all of
 *                their pixels; weight and bias have one value per channel
 *
 * Layer norm and RMS norm may be modulated: with z for what act() is applied to above,
 *
 *   y = act(z * (1 + scale) + shift)
 *
 * with a scale and a shift of `cols` values for each of `samples` samples, each of rows / samples consecutive rows.
 *
 * Arithmetic is done in the compute type: float64 if a big tensor, weight, bias, scale or shift is, otherwise float32. */
typedef struct ek_problem {
  uint32_t struct_size;
  int32_t op;         /* ek_op */
  int32_t layout;     /* ek_layout; group norm */
  int32_t activation; /* ek_activation */
  int32_t casting;    /* ek_casting; RMS norm */
  int32_t reserved;   /* 0 */

  /* Layer norm and RMS norm: `rows` rows of `cols` elements. Rows may come in blocks of `inner_rows` (see ek_tensor);
   * 0 means one block. */
  int64_t rows;
  int64_t cols;
  int64_t inner_rows;

  /* Group norm: spatial is the product of all spatial extents (D*H*W).
   * Of these, layer norm and RMS norm read samples alone, and only if there is a scale or a shift: it must divide rows. */
  int64_t samples;
  int64_t channels;
  int64_t spatial;
  int64_t groups;

  double eps; /* finite, >= 0 */
  /* Added to every weight: 1 for weights that are stored as (weight - 1); 0 without a weight. */
  double weight_offset;
} ek_problem;

/* A big tensor. Strides are in elements; 0 means dense. The innermost elements are always adjacent.
 *
 *   layer, RMS norm   row r is at  (r / inner_rows) * outer_stride + (r % inner_rows) * row_stride
 *   group norm NCHW   element (n, c, s) is at  n * outer_stride + c * row_stride + s
 *   group norm NHWC   element (n, c, s) is at  n * outer_stride + s * row_stride + c
 *
 * So a slice of a wider tensor has a row_stride larger than its row, and a transposed batch has
 * both strides.
 * Rows must not overlap each other. Any byte alignment is accepted. */
typedef struct ek_tensor {
  void* data;
  int64_t row_stride;
  int64_t outer_stride;
  int32_t dtype;    /* ek_dtype */
  int32_t reserved; /* 0 */
} ek_tensor;

/* A dense parameter vector: `cols` (row norms) or `channels` (group norm) elements. data == NULL: absent. */
typedef struct ek_vector {
  void* data;
  int32_t dtype;    /* ek_dtype */
  int32_t reserved; /* 0 */
} ek_vector;

/* mean and rstd are dense, one value per row, or per (sample, group); float64 if x is, otherwise float32.
 * y may be exactly x (same address, type and strides); any other overlap is an error.
 *
 * Layer norm and RMS norm also take a residual. Then sum = x + residual is what is normalized, and all that is said of x
 * above (its statistics, its type in casting orders) is said of the sum. It is added in float32 (in float64 where sum.dtype
 * is), rounded to sum.dtype and normalized as rounded: y and sum are bit for bit what an addition and a norm of its result
 * give. sum.dtype counts even where the sum is not stored (sum.data == NULL), and must be EK_F64 where x or residual is.
 * sum may be exactly x or exactly residual.
 *
 * Layer norm and RMS norm quantize a y of 8 bits, by one scale for all of it (y_scale) or by one for each row, which they
 * compute and store (y_row_scale). Either of the two must be given, and neither with another y. All of it is done in
 * float32, each operation rounded, beginning with y as a float32 y would have been stored; M is the largest number of the
 * type: 448 (E4M3), 57344 (E5M2), 127 (I8).
 *
 *   amax = max(|y|) of the row, NaN if any is; no more than y_amax_bound, if that is not 0
 *   row scale = max(amax / M, 2^-126)
 *   z = y * (1 / scale)
 *   q = z, rounded to nearest even; beyond M, M (I8: below -128, -128); infinity and NaN are NaN in E4M3, themselves in
 *       E5M2, and in I8 (which has neither) the largest and 0: there the row scale tells of them
 *
 * So scale * q is about y, and a row of zeros has a scale that is not zero.
 *
 * Layer norm and RMS norm take a scale and a shift (ek_problem; either may be absent), in types of their own. Of these
 * tensors row_stride is the distance between samples, at least cols (0 = dense), and outer_stride must be 0: the chunks
 * of one wide (samples, 6 * cols) array are read where they lie. */
typedef struct ek_forward_args {
  uint32_t struct_size;
  uint32_t reserved;
  ek_tensor x;
  ek_tensor y;
  ek_vector weight;   /* optional */
  ek_vector bias;     /* optional */
  void* mean;         /* optional output; not for RMS norm */
  void* rstd;         /* optional output */
  ek_tensor residual; /* optional; not for group norm */
  ek_tensor sum;      /* optional output, with a residual */
  /* Of a y of 8 bits. */
  const float* y_scale; /* one value */
  float* y_row_scale;   /* output: dense, one value per row */
  double y_amax_bound;  /* with y_row_scale: > 0, or 0 for none */
  ek_tensor scale;      /* optional; not for group norm */
  ek_tensor shift;      /* optional; not for group norm */
} ek_forward_args;

/* Gradients. Any subset of dx, dresidual, dweight, dbias, dscale and dshift may be absent (data == NULL), but not all. mean
 * and rstd are those of the forward call. bias is only read when there is an activation or a dscale, shift when there is
 * an activation.
 *
 * dscale and dshift have one row of cols values for each sample, as scale and shift do. Those of a sample are sums over
 * its rows alone: no other sample moves a bit of them. A dscale without a scale is that of a scale of zeros.
 *
 * With a residual, x is the sum of the forward call. dsum is the gradient that arrives at the sum from elsewhere: it is
 * added to dx before the one rounding. x and residual of the forward call have the same gradient; dresidual stores it once
 * more, in a type of its own. dx and dresidual may each be exactly dy, x or dsum. */
typedef struct ek_backward_args {
  uint32_t struct_size;
  uint32_t reserved;
  ek_tensor dy;
  ek_tensor x;
  ek_vector weight;    /* optional, as in the forward call */
  ek_vector bias;      /* optional, as in the forward call */
  const void* mean;    /* required, but for RMS norm */
  const void* rstd;    /* required */
  ek_tensor dx;        /* optional output */
  ek_vector dweight;   /* optional output */
  ek_vector dbias;     /* optional output */
  ek_tensor dsum;      /* optional; not for group norm */
  ek_tensor dresidual; /* optional output; not for group norm */
  ek_tensor scale;     /* optional, as in the forward call */
  ek_tensor shift;     /* optional, as in the forward call */
  ek_tensor dscale;    /* optional output; not for group norm */
  ek_tensor dshift;    /* optional output; not for group norm */
} ek_backward_args;

/* A caller's threads. `run` calls task(argument, i) once for every i in [0, tasks), on any threads, in any order, at
 * once or one after the other, and returns when all are done. Tasks never wait for each other.
 * Results do not depend
 * on `threads`. */
typedef struct ek_parallel {
  uint32_t struct_size;
  int32_t threads; /* how many tasks run at once, >= 1 */
  void (*run)(void* context, int64_t tasks, void (*task)(void* argument, int64_t index),
              void* argument);
  void* context;
} ek_parallel;

/* How to execute. */
typedef struct ek_execution {
  uint32_t struct_size;
  int32_t device;       /* ek_device: where all pointers live */
  int32_t device_index; /* CUDA: the ordinal */
  int32_t threads;      /* CPU, built-in pool: 0 = one per processor; ignored with `parallel` */
  void* stream;         /* CUDA: the cudaStream_t; work is enqueued there */
  void* workspace;      /* at least the queried size; its contents are scratch */
  size_t workspace_size;
  const ek_parallel* parallel; /* CPU: the caller's threads; NULL = the built-in pool */
  const char*
      backend; /* NULL = the best that can; or a name from ek_backend_name(), which then must */
} ek_execution;

#define EK_PROBLEM_INIT \
  { sizeof(ek_problem), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1e-5, 0.0 }
#define EK_TENSOR_INIT \
  { NULL, 0, 0, EK_F32, 0 }
#define EK_VECTOR_INIT \
  { NULL, EK_F32, 0 }
#define EK_FORWARD_ARGS_INIT                                                                    \
  {                                                                                             \
    sizeof(ek_forward_args), 0, EK_TENSOR_INIT, EK_TENSOR_INIT, EK_VECTOR_INIT, EK_VECTOR_INIT, \
        NULL, NULL, EK_TENSOR_INIT, EK_TENSOR_INIT, NULL, NULL, 0.0, EK_TENSOR_INIT,            \
        EK_TENSOR_INIT                                                                          \
  }
#define EK_BACKWARD_ARGS_INIT                                                                    \
  {                                                                                              \
    sizeof(ek_backward_args), 0, EK_TENSOR_INIT, EK_TENSOR_INIT, EK_VECTOR_INIT, EK_VECTOR_INIT, \
        NULL, NULL, EK_TENSOR_INIT, EK_VECTOR_INIT, EK_VECTOR_INIT, EK_TENSOR_INIT,              \
        EK_TENSOR_INIT, EK_TENSOR_INIT, EK_TENSOR_INIT, EK_TENSOR_INIT, EK_TENSOR_INIT           \
  }
#define EK_PARALLEL_INIT \
  { sizeof(ek_parallel), 1, NULL, NULL }
#define EK_EXECUTION_INIT \
  { sizeof(ek_execution), EK_CPU, 0, 0, NULL, NULL, 0, NULL, NULL }

/* The workspace that the call with the same structs needs, in bytes (0 is possible). Checks everything but the
 * workspace itself. What the size grows with:
 *   CPU               threads, cols, channels and spatial; rows and samples up to a limit; backward with a scale or
 *                     a shift, rows / 32 and samples without one
 *   CUDA, row norms   backward: cols, and rows up to a limit; forward needs none, but for a sum that is not stored and
 *                     that ek_explain_forward() says is added before, or a y of 8 bits that it says is quantized
 *                     behind: rows and cols. With a scale or a shift: samples and cols, without a limit, backward and
 *                     where ek_explain_...() says that parameters are made before
 *   CUDA, group norm  samples, without a limit, and what each of them has: groups, spatial, in backward channels
 *   reference         backward: cols or channels; forward needs none */
EK_API ek_status ek_forward_workspace(const ek_problem*, const ek_forward_args*,
                                      const ek_execution*, size_t* bytes);
EK_API ek_status ek_backward_workspace(const ek_problem*, const ek_backward_args*,
                                       const ek_execution*, size_t* bytes);
/* Checks the call, picks the backend and runs it. */
EK_API ek_status ek_forward(const ek_problem*, const ek_forward_args*, const ek_execution*);
EK_API ek_status ek_backward(const ek_problem*, const ek_backward_args*, const ek_execution*);

/* The same in two steps, so that a caller that allocates the workspace between them has the call checked and planned
 * once: prepare it, allocate workspace_size bytes, run it. Execution's workspace is not looked at.
 *
 * A prepared call holds copies of the structs, so only what they point to (tensors, stream, the caller's threads) has to
 * stay. It may be copied, and run any number of times, from any thread, with any workspace that suffices. It has a fixed
 * size and is set by ek_prepare_... alone; if that fails, ek_run refuses it. */
typedef struct ek_prepared {
  size_t workspace_size;      /* that ek_run needs, in bytes (0 is possible) */
  unsigned char opaque[2040]; /* the library's */
} ek_prepared;

EK_API ek_status ek_prepare_forward(const ek_problem*, const ek_forward_args*, const ek_execution*,
                                    ek_prepared* prepared);
EK_API ek_status ek_prepare_backward(const ek_problem*, const ek_backward_args*,
                                     const ek_execution*, ek_prepared* prepared);
EK_API ek_status ek_run(const ek_prepared* prepared, void* workspace, size_t workspace_size);

/* Which backend the call will run on, and why. *backend (may be NULL) is set to its name. `text` (may be NULL)
 * receives up to `capacity` bytes with one line for each backend, best first:
 *   "cpu: runs: AVX3, ...", "cuda: declined: ...", "reference: not needed: cpu comes first" */
EK_API ek_status ek_explain_forward(const ek_problem*, const ek_forward_args*, const ek_execution*,
                                    const char** backend, char* text, size_t capacity);
EK_API ek_status ek_explain_backward(const ek_problem*, const ek_backward_args*,
                                     const ek_execution*, const char** backend, char* text,
                                     size_t capacity);

/* The last failure of this thread, as a sentence; "" if there was none. Valid until this thread's next call. */
EK_API const char* ek_last_error(void);
/* "EK_OK" and so on. */
EK_API const char* ek_status_name(ek_status);

/* Name of the index-th backend of this build, best first; NULL past the last. */
EK_API const char* ek_backend_name(int32_t index);

/* The CPU backend's instruction sets that this machine can run, best first; NULL past the last. The environment
 * variable EVENKEEL_CPU_TARGET=<name>, read when the library is loaded, makes the CPU backend use another one than
 * the best. */
EK_API const char* ek_cpu_target_name(int32_t index);

/* "0.1.0": of the library, to compare with the header's. */
EK_API const char* ek_version(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* EVENKEEL_EVENKEEL_H_ */
