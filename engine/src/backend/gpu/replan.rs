//! Other plan options for a backend that has been loaded.

/// Makes parts for other options. The present parts are dropped first, because there may be no memory for both. If the new
/// ones cannot be made, the present ones are made again, and the error is that of the new ones.
///
/// `parts` is empty after an error only if the present ones cannot be made again either.
pub(super) fn replan<T, O: Copy, E>(
    parts: &mut Vec<T>,
    present: &mut O,
    options: O,
    mut make: impl FnMut(O) -> Result<Vec<T>, E>,
) -> Result<(), E> {
    parts.clear();
    match make(options) {
        Ok(made) => {
            (*parts, *present) = (made, options);
            Ok(())
        }
        Err(error) => {
            if let Ok(made) = make(*present) {
                *parts = made;
            }
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_for_which_memory_lacks_change_nothing() {
        let (mut parts, mut present) = (vec![1], 1);
        let most = |most: u32| {
            move |size: u32| {
                if size > most {
                    Err(size)
                } else {
                    Ok(vec![size])
                }
            }
        };
        assert_eq!(replan(&mut parts, &mut present, 3, most(4)), Ok(()));
        assert_eq!((&parts[..], present), (&[3][..], 3));
        assert_eq!(replan(&mut parts, &mut present, 5, most(4)), Err(5));
        assert_eq!((&parts[..], present), (&[3][..], 3), "made again");
        // Another program took the memory.
        assert_eq!(replan(&mut parts, &mut present, 5, most(2)), Err(5));
        assert!(parts.is_empty());
        assert_eq!(replan(&mut parts, &mut present, 2, most(2)), Ok(()));
        assert_eq!((&parts[..], present), (&[2][..], 2));
    }
}
