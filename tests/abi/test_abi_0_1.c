/* A program that was compiled when evenkeel was 0.1: its header is a copy of that version's, and never changes. It is
 * linked to today's library, which must still understand every struct and have every function. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "0.1/evenkeel.h"

static int failures = 0;

static void expect(const char* what, int holds) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "%s: wrong; ek_last_error() is \"%s\"\n", what, ek_last_error());
}

static void expect_values(const char* what, const float* values, const float* expected, int count) {
  for (int i = 0; i < count; ++i) {
    if (fabsf(values[i] - expected[i]) <= 1e-6f) continue;
    ++failures;
    fprintf(stderr, "%s[%d] is %g, but must be %g\n", what, i, values[i], expected[i]);
  }
}

static int tasks_run = 0;
static void run_tasks(void* context, int64_t tasks, void (*task)(void*, int64_t), void* argument) {
  *(int*)context += 1;
  for (int64_t i = 0; i < tasks; ++i) task(argument, i);
}

/* Scratch for every call here; what lies behind a struct on the stack must not matter, so nothing is zeroed. */
static char workspace[1 << 20];

static void layer_norm(void) {
  const float x[4] = {1, 3, -2, 2}, weight[2] = {2, 3}, bias[2] = {10, 20};
  const float dy[4] = {1, 2, 3, 5};
  float y[4], mean[2], rstd[2], dx[4], dweight[2], dbias[2];
  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = EK_LAYER_NORM;
  problem.rows = 2;
  problem.cols = 2;
  problem.eps = 0;

  ek_forward_args forward = EK_FORWARD_ARGS_INIT;
  forward.x.data = (void*)x;
  forward.y.data = y;
  forward.weight.data = (void*)weight;
  forward.bias.data = (void*)bias;
  forward.mean = mean;
  forward.rstd = rstd;
  ek_execution execution = EK_EXECUTION_INIT;
  execution.workspace = workspace;
  execution.threads = 1;
  expect("ek_forward_workspace",
         ek_forward_workspace(&problem, &forward, &execution, &execution.workspace_size) == EK_OK);
  expect("ek_forward", ek_forward(&problem, &forward, &execution) == EK_OK);
  expect_values("y", y, (const float[]){8, 23, 8, 23}, 4);
  expect_values("mean", mean, (const float[]){2, 0}, 2);
  expect_values("rstd", rstd, (const float[]){1, 0.5f}, 2);

  ek_backward_args backward = EK_BACKWARD_ARGS_INIT;
  backward.dy.data = (void*)dy;
  backward.x.data = (void*)x;
  backward.weight.data = (void*)weight;
  backward.mean = mean;
  backward.rstd = rstd;
  backward.dx.data = dx;
  backward.dweight.data = dweight;
  backward.dbias.data = dbias;
  expect("ek_backward_workspace", ek_backward_workspace(&problem, &backward, &execution,
                                                        &execution.workspace_size) == EK_OK);
  expect("ek_backward", ek_backward(&problem, &backward, &execution) == EK_OK);
  expect_values("dx", dx, (const float[]){0, 0, 0, 0}, 4);
  expect_values("dweight", dweight, (const float[]){-4, 7}, 2);
  expect_values("dbias", dbias, (const float[]){4, 7}, 2);

  const char* backend = NULL;
  char text[1024];
  execution.backend = "reference";
  expect("ek_explain_forward",
         ek_explain_forward(&problem, &forward, &execution, &backend, text, sizeof text) == EK_OK &&
             strcmp(backend, "reference") == 0);
  expect("ek_explain_backward", ek_explain_backward(&problem, &backward, &execution, &backend, text,
                                                    sizeof text) == EK_OK &&
                                    strstr(text, "reference: runs: ") != NULL);
}

/* Channels last with SiLU: two groups of one channel, whose pixels normalize to -1 and 1. */
static void group_norm(void) {
  const float x[4] = {1, -2, 3, 2}, silu = 1 / (1 + expf(-1));
  float y[4];
  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = EK_GROUP_NORM;
  problem.layout = EK_NHWC;
  problem.activation = EK_ACTIVATION_SILU;
  problem.samples = 1;
  problem.channels = 2;
  problem.spatial = 2;
  problem.groups = 2;
  problem.eps = 0;
  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  args.x.data = (void*)x;
  args.y.data = y;
  ek_execution execution = EK_EXECUTION_INIT;
  execution.workspace = workspace;
  execution.workspace_size = sizeof workspace;
  expect("group norm", ek_forward(&problem, &args, &execution) == EK_OK);
  expect_values("y", y, (const float[]){silu - 1, silu - 1, silu, silu}, 4);
}

/* Long enough to be worth a second thread, which the caller lends. */
static void callers_threads(void) {
  enum { kRows = 64, kCols = 1024 };
  static float x[kRows * kCols], y[kRows * kCols];
  for (int i = 0; i < kRows * kCols; ++i) x[i] = i % 2 == 0 ? 3.f : -3.f;
  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = EK_RMS_NORM;
  problem.casting = EK_CASTING_GEMMA;
  problem.rows = kRows;
  problem.cols = kCols;
  problem.eps = 0;
  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  args.x.data = x;
  args.y.data = y;
  ek_parallel parallel = EK_PARALLEL_INIT;
  parallel.threads = 2;
  parallel.run = run_tasks;
  parallel.context = &tasks_run;
  ek_execution execution = EK_EXECUTION_INIT;
  execution.parallel = &parallel;
  execution.backend = "cpu";
  execution.workspace = workspace;
  execution.workspace_size = sizeof workspace;
  expect("RMS norm", ek_forward(&problem, &args, &execution) == EK_OK);
  expect("the caller's threads are used", tasks_run > 0);
  expect_values("y", y + (kRows - 1) * kCols, (const float[]){1, -1, 1, -1}, 4);
}

static void queries(void) {
  expect("ek_version", strchr(ek_version(), '.') != NULL);
  expect("ek_backend_name", ek_backend_name(0) != NULL && ek_backend_name(-1) == NULL);
  expect("ek_cpu_target_name", ek_cpu_target_name(0) != NULL);
  expect("ek_status_name", strcmp(ek_status_name(EK_UNSUPPORTED), "EK_UNSUPPORTED") == 0);
  expect("NULL", ek_forward(NULL, NULL, NULL) == EK_INVALID_ARGUMENT &&
                     strstr(ek_last_error(), "problem is NULL") != NULL);
}

int main(void) {
  layer_norm();
  group_norm();
  callers_threads();
  queries();
  if (failures == 0) printf("built with 0.1.0, run with %s: as before\n", ek_version());
  return failures != 0;
}
