//! Dates as chat templates write them.

const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A time in seconds since 1970, in UTC, in the format of C's `strftime`. `%-d`, as of other numbers, has no zeros or spaces
/// before it. Returns a conversion that it does not know.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (mut year, mut day) = (1970, days);
    let in_year = |year: u64| 365 + u64::from(is_leap(year));
    while day >= in_year(year) {
        day -= in_year(year);
        year += 1;
    }
    let of_year = day + 1;
    let mut month = 0;
    while day >= in_month(year, month) {
        day -= in_month(year, month);
        month += 1;
    }
    let (name, weekday) = (MONTHS[month], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let bare = rest.as_str().starts_with('-');
        let conversion = rest.nth(usize::from(bare));
        let written = match conversion {
            Some('B' | 'b' | 'A' | 'a' | 'p' | '%') if bare => {
                return Err(unknown(bare, conversion));
            }
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{:02}", month + 1),
            Some('B') => name.to_owned(),
            Some('b') => name[..3].to_owned(),
            Some('d') => format!("{:02}", day + 1),
            Some('e') => format!("{:2}", day + 1),
            Some('j') => format!("{of_year:03}"),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{:02}", second / 3600),
            Some('I') => format!("{:02}", (second / 3600 + 11) % 12 + 1),
            Some('p') => if second < 43_200 { "AM" } else { "PM" }.to_owned(),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('%') => "%".to_owned(),
            other => return Err(unknown(bare, other)),
        };
        let (before, last) = written.split_at(written.len() - 1);
        text += if bare {
            before.trim_start_matches(['0', ' '])
        } else {
            before
        };
        text += last;
    }
    Ok(text)
}

fn unknown(bare: bool, conversion: Option<char>) -> String {
    let conversion = conversion.map(String::from).unwrap_or_default();
    format!("%{}{conversion}", if bare { "-" } else { "" })
}

const fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

const fn in_month(year: u64, month: usize) -> u64 {
    match month {
        1 => 28 + is_leap(year) as u64,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts are those of GNU `date -u`.
    #[test]
    fn hours_are_those_of_clocks_and_numbers_may_be_bare() {
        let all = "%I:%M %p|%e|%-d.%-m.%-y %-H %-I %-M %-S %-j %-Y|%-e";
        for (seconds, expected) in [
            (0, "12:00 AM| 1|1.1.70 0 12 0 0 1 1970|1"),
            (951_868_799, "11:59 PM|29|29.2.0 23 11 59 59 60 2000|29"),
            // 2009-10-05 13:07:09
            (1_254_748_029, "01:07 PM| 5|5.10.9 13 1 7 9 278 2009|5"),
            // 2024-12-31 12:00:00
            (1_735_646_400, "12:00 PM|31|31.12.24 12 12 0 0 366 2024|31"),
        ] {
            assert_eq!(strftime(all, seconds).unwrap(), expected);
        }
    }

    /// The expected texts are those of GNU `date -u`.
    #[test]
    fn dates_are_those_of_the_calendar() {
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %y %j %%";
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 Thursday Thu January Jan 70 001 %"),
            (
                951_868_799,
                "2000-02-29 23:59:59 Tuesday Tue February Feb 00 060 %",
            ),
            (
                1_735_689_599,
                "2024-12-31 23:59:59 Tuesday Tue December Dec 24 366 %",
            ),
            (
                4_107_542_400,
                "2100-03-01 00:00:00 Monday Mon March Mar 00 060 %",
            ),
        ] {
            assert_eq!(strftime(all, seconds).unwrap(), expected);
        }
        assert_eq!(strftime("%Q", 0).unwrap_err(), "%Q");
        assert_eq!(strftime("100%", 0).unwrap_err(), "%");
        assert_eq!(strftime("%-", 0).unwrap_err(), "%-");
        assert_eq!(strftime("%-B", 0).unwrap_err(), "%-B");
    }
}
