//! Quantities of the Kubernetes API by value: `0.5` and `500m` are one. The server stores what it was sent in its own
//! spelling, so comparing texts would find drift for ever. Pure.

/// Are these the same quantity? Texts that cannot be read are compared as texts.
pub fn equal(a: &str, b: &str) -> bool {
    a == b || nanos(a).is_some_and(|a| nanos(b) == Some(a))
}

/// The value in units of 10^-9, rounded up as the server does; `None`: no quantity, or beyond what fits.
fn nanos(text: &str) -> Option<i128> {
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let mantissa: i128 = format!("{whole}{fraction}").parse().ok()?; // a second dot, or no digit, is no number
    let (numerator, denominator) = scale(suffix)?;
    let numerator = mantissa.checked_mul(numerator)?;
    let denominator = denominator.checked_mul(10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?)?;
    let value = numerator.checked_add(denominator - 1)? / denominator;
    Some(if negative { -value } else { value })
}

/// What one unit with this suffix is in 10^-9, as a fraction.
fn scale(suffix: &str) -> Option<(i128, i128)> {
    const NANO: i128 = 1_000_000_000;
    if let Some(binary) = suffix.strip_suffix('i') {
        let power = 1 + ["K", "M", "G", "T", "P", "E"].iter().position(|unit| *unit == binary)?;
        return Some((NANO << (10 * power), 1));
    }
    if let Some(exponent) = suffix.strip_prefix(['e', 'E']).filter(|digits| !digits.is_empty()) {
        return power_of_ten(exponent.parse::<i32>().ok()?.checked_add(9)?);
    }
    let exponents =
        [("n", 0), ("u", 3), ("m", 6), ("", 9), ("k", 12), ("M", 15), ("G", 18), ("T", 21), ("P", 24), ("E", 27)];
    power_of_ten(exponents.iter().find(|(unit, _)| *unit == suffix)?.1)
}

fn power_of_ten(exponent: i32) -> Option<(i128, i128)> {
    let power = 10_i128.checked_pow(exponent.unsigned_abs())?;
    Some(if exponent < 0 { (1, power) } else { (power, 1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spellings_of_one_value() {
        let same = [
            ("0.5", "500m"),
            ("1", "1000m"),
            ("2.50", "2500m"),
            ("1k", "1000"),
            ("1e3", "1k"),
            ("1E3", "1000"),
            ("5e-1", "500m"),
            ("1Gi", "1024Mi"),
            ("1.5Gi", "1536Mi"),
            ("1Ki", "1024"),
            ("1M", "1000k"),
            ("1E", "1000P"),
            ("1Ei", "1024Pi"),
            (".5", "500m"),
            ("1.", "1"),
            ("+1", "1"),
            ("0", "0Mi"),
            ("-0.5", "-500m"),
            ("0.1u", "100n"),
            ("0.1n", "1n"),
        ];
        for (a, b) in same {
            assert!(equal(a, b) && equal(b, a), "{a} {b}");
        }
        let other = [
            ("0.5", "501m"),
            ("1G", "1Gi"),
            ("1M", "1m"),
            ("1", "-1"),
            ("", "0"),
            (".", "0"),
            ("1.0.0", "1"),
            ("1K", "1000"),
            ("1i", "1"),
            ("1e", "1"),
            ("x", "y"),
            ("9e99", "1"),
            ("1 ", "1"),
            ("--1", "-1"),
            ("1e2000000000", "1e2000000001"),
        ];
        for (a, b) in other {
            assert!(!equal(a, b) && !equal(b, a), "{a} {b}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_each_equals_itself(a in "[-+]?[0-9.]{0,45}[a-zA-Z]{0,2}[-0-9]{0,12}", b in ".{0,12}") {
            prop_assert!(equal(&a, &a) && equal(&b, &b));
            prop_assert_eq!(equal(&a, &b), equal(&b, &a));
        }
    }
}
