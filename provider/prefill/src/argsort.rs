//! The order in which a router's scores are taken, equal ones included.
//!
//! ggml sorts the indices of a row with `std::sort`, which is not stable beyond sixteen elements: which of two equal
//! experts is chosen, and in which order their outputs are added up, follows from the steps of the C++ library that the
//! servers are built with (libstdc++: quicksort with the median of three until sixteen are left, heapsort where that does
//! not shrink, insertion sort at the end). The same steps are taken here. Up to sixteen elements the lower index comes
//! first.

/// Parts of this size and smaller are left to the insertion sort at the end.
const SMALL: usize = 16;

/// Indices of `values`, the largest value first. No value may be NaN.
pub fn descending(values: &[f32], order: &mut Vec<u32>) {
    order.clear();
    order.extend(0..values.len() as u32);
    let first = |a: u32, b: u32| values[a as usize] > values[b as usize];
    if order.len() > 1 {
        let depth = 2 * order.len().ilog2();
        quick(order, depth, &first);
        let (start, rest) = (order.len().min(SMALL), order.len());
        for i in 1..start {
            let v = order[i];
            if first(v, order[0]) {
                order.copy_within(0..i, 1);
                order[0] = v;
            } else {
                insert(order, i, &first);
            }
        }
        (start..rest).for_each(|i| insert(order, i, &first));
    }
}

/// Moves element `i` to the left, past everything that it comes before. The caller knows that something stops it.
fn insert(order: &mut [u32], mut i: usize, first: &impl Fn(u32, u32) -> bool) {
    let v = order[i];
    while i > 0 && first(v, order[i - 1]) {
        order[i] = order[i - 1];
        i -= 1;
    }
    order[i] = v;
}

fn quick(order: &mut [u32], mut depth: u32, first: &impl Fn(u32, u32) -> bool) {
    let mut end = order.len();
    while end > SMALL {
        if depth == 0 {
            heap_sort(&mut order[..end], first);
            return;
        }
        depth -= 1;
        let cut = partition(&mut order[..end], first);
        quick(&mut order[cut..end], depth, first);
        end = cut;
    }
}

/// Splits around the median of the second, the middle and the last element; returns where the second part begins.
fn partition(order: &mut [u32], first: &impl Fn(u32, u32) -> bool) -> usize {
    let (a, b, c) = (1, order.len() / 2, order.len() - 1);
    let before = |x: usize, y: usize| first(order[x], order[y]);
    let median = match (before(a, b), before(b, c), before(a, c)) {
        (true, true, _) | (false, false, false) => b,
        (true, false, true) | (false, true, false) => c,
        (true, false, false) | (false, _, true) => a,
    };
    order.swap(0, median);
    let pivot = order[0];
    let (mut low, mut high) = (1, order.len());
    loop {
        // The pivot stops both, or an element that was swapped does.
        while first(order[low], pivot) {
            low += 1;
        }
        high -= 1;
        while first(pivot, order[high]) {
            high -= 1;
        }
        if low >= high {
            return low;
        }
        order.swap(low, high);
        low += 1;
    }
}

fn heap_sort(order: &mut [u32], first: &impl Fn(u32, u32) -> bool) {
    for parent in (0..order.len() / 2).rev() {
        let v = order[parent];
        sift(order, parent, v, first);
    }
    for end in (1..order.len()).rev() {
        let v = order[end];
        order[end] = order[0];
        sift(&mut order[..end], 0, v, first);
    }
}

/// Fills the hole at `top` with `v`: the hole sinks to a leaf along the later children, then `v` rises from there.
fn sift(heap: &mut [u32], top: usize, v: u32, first: &impl Fn(u32, u32) -> bool) {
    let n = heap.len();
    let mut hole = top;
    while 2 * hole + 2 < n {
        let (left, right) = (2 * hole + 1, 2 * hole + 2);
        let child = if first(heap[right], heap[left]) { left } else { right };
        heap[hole] = heap[child];
        hole = child;
    }
    if 2 * hole + 1 < n {
        heap[hole] = heap[2 * hole + 1];
        hole = 2 * hole + 1;
    }
    while hole > top && first(heap[(hole - 1) / 2], v) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = v;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(values: &[f32]) -> Vec<u32> {
        let mut order = Vec::new();
        descending(values, &mut order);
        order
    }

    fn hash(h: u64, order: &[u32]) -> u64 {
        order.iter().fold(h, |h, &i| (h ^ u64::from(i)).wrapping_mul(0x0100_0000_01b3))
    }

    const FNV: u64 = 0xcbf2_9ce4_8422_2325;

    // Everything below was printed by a C++ program that calls `std::sort` (g++ 12, libstdc++) with ggml's comparison.

    #[test]
    fn equal_values_come_in_the_order_of_the_servers() {
        let five = |n: usize| (0..n).map(|i| ((i * 7 + i * i * 3) % 5) as f32).collect::<Vec<_>>();
        assert_eq!(order(&five(4)), [3, 2, 0, 1]);
        assert_eq!(order(&five(16)), [3, 8, 13, 2, 4, 7, 9, 12, 14, 0, 1, 5, 6, 10, 11, 15]);
        assert_eq!(order(&five(17)), [3, 8, 13, 2, 4, 14, 7, 9, 12, 16, 0, 15, 11, 10, 6, 5, 1]);
        assert_eq!(
            order(&five(40)),
            [
                28, 3, 38, 23, 8, 18, 13, 33, 14, 27, 29, 24, 22, 32, 19, 17, 34, 12, 9, 7, 37, 4, 2, 39, 20, 35, 36,
                31, 30, 26, 25, 21, 0, 16, 15, 11, 10, 6, 5, 1
            ]
        );
    }

    #[test]
    fn fifty_rows_of_each_length_are_ordered_as_the_servers_do() {
        let want = [
            (20, 0xd39e_271f_21b1_993b),
            (100, 0x6d55_cc24_8d40_554d),
            (256, 0xf541_24a2_c80c_5b6b),
            (1024, 0x23ae_e728_a9dc_dbbd_u64),
        ];
        for (n, want) in want {
            let mut h = FNV;
            for s in 1..=50u32 {
                let mut x = s.wrapping_mul(2_654_435_761);
                let mut next = || {
                    x ^= x << 13;
                    x ^= x >> 17;
                    x ^= x << 5;
                    (x % (s + 1)) as f32
                };
                h = hash(h, &order(&(0..n).map(|_| next()).collect::<Vec<_>>()));
            }
            assert_eq!(h, want, "rows of {n}");
        }
    }

    /// Values that make the median of three useless, so that heapsort takes over; found by the C++ program while it sorted.
    #[test]
    fn the_worst_case_is_ordered_as_the_servers_do() {
        let worst: [u8; 200] = [
            81, 0, 62, 1, 90, 2, 61, 3, 80, 4, 60, 5, 97, 6, 59, 7, 79, 8, 58, 9, 89, 10, 57, 11, 78, 12, 14, 13, 99,
            98, 97, 96, 95, 94, 93, 92, 91, 90, 89, 88, 87, 86, 85, 84, 83, 82, 81, 80, 79, 78, 77, 76, 75, 74, 73, 72,
            71, 70, 69, 68, 67, 66, 65, 64, 63, 62, 61, 60, 59, 58, 94, 77, 88, 76, 98, 75, 87, 74, 93, 73, 86, 72, 96,
            71, 85, 70, 92, 69, 84, 68, 99, 67, 83, 66, 91, 65, 82, 64, 95, 63, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
            12, 13, 57, 55, 56, 54, 55, 53, 54, 52, 53, 51, 52, 50, 51, 49, 50, 48, 49, 47, 48, 46, 47, 45, 46, 44, 45,
            43, 44, 42, 43, 41, 42, 40, 41, 39, 40, 38, 39, 37, 38, 36, 37, 35, 36, 34, 35, 33, 34, 32, 33, 31, 32, 30,
            31, 29, 30, 28, 29, 27, 28, 26, 27, 25, 26, 24, 25, 23, 24, 22, 23, 21, 22, 20, 21, 19, 20, 18, 19, 17, 18,
            16, 17, 15, 16, 14, 15, 56,
        ];
        let values = worst.map(|v| -f32::from(v));
        assert_eq!(hash(FNV, &order(&values)), 0x5888_5b5b_24dc_c52b);
    }

    #[test]
    fn nothing_and_one_are_in_order() {
        assert!(order(&[]).is_empty());
        assert_eq!(order(&[7.0]), [0]);
    }
}
