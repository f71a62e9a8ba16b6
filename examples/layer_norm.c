/* Layer norm from C: two rows of four values, with weight and bias, and the statistics.
 *
 * The pattern of every call: describe the problem, name the tensors, ask for the workspace, run.
 * Build it with: cc layer_norm.c $(pkg-config --cflags --libs evenkeel) -lm */
#include <evenkeel/evenkeel.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  float x[8] = {1, 2, 3, 4, -2, 0, 0, 2};
  float weight[4] = {1, 1, 1, 2};
  float bias[4] = {0, 0, 0, 1};
  float y[8], mean[2], rstd[2];

  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = EK_LAYER_NORM;
  problem.rows = 2;
  problem.cols = 4;

  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  args.x.data = x;
  args.y.data = y;
  args.weight.data = weight;
  args.bias.data = bias;
  args.mean = mean;
  args.rstd = rstd;

  ek_execution execution = EK_EXECUTION_INIT;
  ek_status status = ek_forward_workspace(&problem, &args, &execution, &execution.workspace_size);
  if (status == EK_OK) {
    execution.workspace = malloc(execution.workspace_size);
    status = ek_forward(&problem, &args, &execution);
    free(execution.workspace);
  }
  if (status != EK_OK) {
    fprintf(stderr, "%s: %s\n", ek_status_name(status), ek_last_error());
    return 1;
  }

  /* The variances are 1.25 and 2. */
  const float a = 1.0f / sqrtf(1.25f + 1e-5f), b = 1.0f / sqrtf(2.0f + 1e-5f);
  const float expected[8] = {-1.5f * a, -0.5f * a, 0.5f * a, 3 * a + 1, -2 * b, 0, 0, 4 * b + 1};
  int wrong = fabsf(mean[0] - 2.5f) > 1e-6f || fabsf(rstd[1] - b) > 1e-6f;
  for (int i = 0; i < 8; ++i) {
    printf("%9.6f%s", y[i], i % 4 == 3 ? "\n" : " ");
    if (!(fabsf(y[i] - expected[i]) <= 1e-5f)) wrong = 1;
  }
  puts(wrong ? "wrong" : "right");
  return wrong;
}
