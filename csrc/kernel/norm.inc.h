/* LayerNorm of one row: dst = (s - mean) / sqrt(variance + epsilon) * weight + bias, s = x + residual.
 * RMSNorm is the same with a mean of 0: dst = s / sqrt(sum of squares / columns + epsilon) * weight.
 *
 * Three passes over a row in the first-level cache: the sum, the squared distances from the mean, the
 * result. E[s^2] - mean^2 would lose everything for a large mean; here the second pass also sums the
 * distances themselves, which corrects the rounding of the mean (Chan, Golub and LeVeque, 1983).
 */

/* The sum of (row[j] - mean)^2, and that of row[j] - mean into *distance. */
#define sum_squares TA_NAME(sum_squares)
TA_INLINE real sum_squares(const real *row, ptrdiff_t columns, real mean, real *distance)
{
    ptrdiff_t whole = columns / TA_VL * TA_VL;
    vec squares = vec_all(0), distances = vec_all(0);
    for (ptrdiff_t j = 0; j < whole; j += TA_VL) {
        vec d = vec_load(row + j) - vec_all(mean);
        squares += d * d;
        distances += d;
    }
    real square = vec_sum(squares);
    *distance = vec_sum(distances);
    for (ptrdiff_t j = whole; j < columns; j++) {
        real d = row[j] - mean;
        square += d * d;
        *distance += d;
    }
    return square;
}

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
    double epsilon = norm->epsilon;
    real mean = norm->subtract_mean ? sum / columns : 0, distance;
    real square = sum_squares(dst, columns, mean, &distance);
    if (!isfinite(square)) {
        /* Too large to be squared: the same row in a unit in which the largest numbers are not. Epsilon
         * would be lost, but a row of equal numbers still has to have some. */
        const real unit = (real)(TA_BITS == 32 ? 0x1p-80 : 0x1p-560);
        sum = 0;
        for (ptrdiff_t j = 0; j < columns; j++)
            sum += dst[j] *= unit;
        epsilon = fmax(epsilon * unit * unit, 0x1p-1000);
        mean = norm->subtract_mean ? sum / columns : 0;
        square = sum_squares(dst, columns, mean, &distance);
    }
    real correction = norm->subtract_mean ? distance / columns : 0;
    real variance = square / columns - correction * correction;
    real inverse = (real)(1 / sqrt((double)variance + epsilon));

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
