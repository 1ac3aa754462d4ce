-- Parts of a group's name, <split>-<step>-<example>, as `names.py` writes it.
create temp macro split_of(group_id) as regexp_extract(group_id, '^(.+)-\d{5,}-\d{4,}$', 1);
create temp macro place_of(group_id) as regexp_extract(group_id, '\d+$')::bigint;
create temp macro baseline_of(group_id) as
    regexp_replace(group_id, '^.+(-\d{5,}-\d{4,})$', 'baseline\1');
