// Layer norm from C++: forward, then backward with the statistics of the forward call.
//
// A gradient can be checked without a second implementation: the rows of dx are orthogonal to a
// constant and to the normalized row, because shifting or scaling x leaves y as it was.
#include <cmath>
#include <cstdio>
#include <vector>

#include <evenkeel/evenkeel.hpp>

int main() {
  const std::int64_t rows = 3, cols = 1000;
  std::vector<float> x(rows * cols), y(x.size()), dy(x.size()), dx(x.size());
  std::vector<float> mean(rows), rstd(rows), dbias(cols);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(0.1f * static_cast<float>(i)) + 5.0f;
    dy[i] = std::cos(0.3f * static_cast<float>(i));
  }

  try {
    const evenkeel::Problem problem = evenkeel::layer_norm(rows, cols);
    evenkeel::Workspace workspace;
    evenkeel::forward(problem, {.x = x, .y = y, .mean = mean, .rstd = rstd}, workspace);
    evenkeel::backward(problem,
                       {.dy = dy, .x = x, .mean = mean, .rstd = rstd, .dx = dx, .dbias = dbias},
                       workspace);
    std::printf("%s", evenkeel::explain(problem, {.x = x, .y = y}).c_str());
  } catch (const evenkeel::Error& error) {
    std::fprintf(stderr, "%s: %s\n", ek_status_name(error.status()), error.what());
    return 1;
  }

  bool right = true;
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0, square = 0, dx_sum = 0, dx_y = 0, dx_square = 0;
    for (std::int64_t c = r * cols; c < (r + 1) * cols; ++c) {
      sum += y[c];
      square += static_cast<double>(y[c]) * y[c];
      dx_sum += dx[c];
      dx_y += static_cast<double>(dx[c]) * y[c];
      dx_square += static_cast<double>(dx[c]) * dx[c];
    }
    right = right && std::abs(sum) < 1e-2 && std::abs(square / cols - 1) < 1e-3 &&
            std::abs(dx_sum) < 1e-2 && std::abs(dx_y) < 1e-1 && dx_square > 1;
  }
  right = right && std::abs(dbias[7] - (dy[7] + dy[cols + 7] + dy[2 * cols + 7])) < 1e-5f;
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
