/* LayerNorm of one row: dst = (s - mean) / sqrt(variance + epsilon) * weight + bias, s = x + residual.
 *
 * Three passes over a row in the first-level cache: the sum, the squared distances from the mean, the
 * result. E[s^2] - mean^2 would lose everything for a large mean; here the second pass also sums the
 * distances themselves, which corrects the rounding of the mean (Chan, Golub and LeVeque, 1983).
 */
static void TA_NAME(add_norm_row)(void *dst_, const void *x_, const void *residual_, const ta_norm *norm)
{
    real *dst = dst_;
    const real *x = x_, *residual = residual_, *weight = norm->weight, *bias = norm->bias;
    ptrdiff_t columns = norm->columns, whole = columns / TA_VL * TA_VL;

    vec sums = vec_all(0);
    for (ptrdiff_t j = 0; j < whole; j += TA_VL) {
        vec s = vec_load(x + j);
        if (residual != NULL)
            s += vec_load(residual + j);
        vec_store(dst + j, s);
        sums += s;
    }
    real sum = vec_sum(sums);
    for (ptrdiff_t j = whole; j < columns; j++) {
        dst[j] = residual != NULL ? x[j] + residual[j] : x[j];
        sum += dst[j];
    }
    if (!norm->normalize)
        return;
    real mean = sum / columns;

    vec squares = vec_all(0), distances = vec_all(0);
    for (ptrdiff_t j = 0; j < whole; j += TA_VL) {
        vec d = vec_load(dst + j) - vec_all(mean);
        squares += d * d;
        distances += d;
    }
    real square = vec_sum(squares), distance = vec_sum(distances);
    for (ptrdiff_t j = whole; j < columns; j++) {
        real d = dst[j] - mean;
        square += d * d;
        distance += d;
    }
    real correction = distance / columns;
    real variance = square / columns - correction * correction;
    real inverse = (real)(1 / sqrt((double)variance + norm->epsilon));

    /* The correction is taken off the distance: it may be too small to change the mean. */
    for (ptrdiff_t j = 0; j < whole; j += TA_VL) {
        vec y = (vec_load(dst + j) - vec_all(mean) - vec_all(correction)) * vec_all(inverse);
        if (weight != NULL)
            y *= vec_load(weight + j);
        if (bias != NULL)
            y += vec_load(bias + j);
        vec_store(dst + j, y);
    }
    for (ptrdiff_t j = whole; j < columns; j++) {
        real y = (dst[j] - mean - correction) * inverse;
        if (weight != NULL)
            y *= weight[j];
        if (bias != NULL)
            y += bias[j];
        dst[j] = y;
    }
}
