-- Rows of files, each as it is: no folder's name is a column.
create temp macro parquet_rows(files) as table
    select * from read_parquet(files, hive_partitioning = false);
create temp macro named_parquet_rows(files) as table
    select * from read_parquet(files, hive_partitioning = false, filename = true);
create temp macro json_lines(files) as table
    select * from read_ndjson_objects(files, hive_partitioning = false);
