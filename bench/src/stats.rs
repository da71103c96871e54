//! Numbers out of several runs: the median, since one disturbed run must not move the figure. No means, no deviations; a
//! handful of runs does not bear them.

/// The middle value, or the mean of the two in the middle; `None` of nothing. What is not a number does not count.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.into_iter().filter(|v| !v.is_nan()).collect();
    (!values.is_empty()).then(|| conformance::routes::median(values))
}

/// The largest value; `None` of nothing.
pub fn largest(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    values.into_iter().filter(|v| !v.is_nan()).max_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([7.0, f64::NAN]), Some(7.0));
        assert_eq!(median([]), None);
    }

    #[test]
    fn largest_of_some() {
        assert_eq!(largest([1.0, 9.0, f64::NAN, 2.0]), Some(9.0));
        assert_eq!(largest([]), None);
    }
}
